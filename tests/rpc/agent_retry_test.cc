// Calls that are made again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stop_token>

#include "absl/synchronization/notification.h"
#include "agent_fixture.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::HasSubstr;

class AgentRetryTest : public AgentTest {
 protected:
  static CallOptions Again(int attempts = 1000) {
    CallOptions options;
    options.retry = RetryPolicy{attempts, absl::Milliseconds(1), absl::Milliseconds(5)};
    return options;
  }
  // Answers what is parked, and refuses beyond one.
  Agent& StartFull(const std::string& name) {
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    options.max_calls_served = 1;
    Agent& agent = Start(name, options);
    ServePark(agent);
    return agent;
  }
};
INSTANTIATE_AGENT_TESTS(AgentRetryTest);

TEST_P(AgentRetryTest, WhatWasRefusedIsMadeAgainUntilItIsTaken) {
  Agent& a = Start("a");
  Agent& b = StartFull("b");
  Introduce(a, b);
  auto first = a.Call("b", {"park"}, Body("first"));
  ASSERT_TRUE(parked_.Await(1));
  std::atomic<int> returned{0};
  Payload request = Body("second");
  at::Tensor lent = at::ones({3});
  at::Tensor copied = at::ones({100000});
  request.tensors.push_back(Lend(lent, [&] { ++returned; }));
  request.tensors.push_back(Copy(copied));
  auto second = a.Call("b", {"park"}, std::move(request), Again());
  copied.fill_(7);  // Of no concern to the call.
  // It waits for the first one's answer; how often it asks meanwhile is nobody's business.
  EXPECT_EQ(returned.load(), 0);
  for (Responder& responder : parked_.Take()) std::move(responder).Reply(Body(""));
  ASSERT_TRUE(first.Wait(kHang).ok());
  ASSERT_TRUE(parked_.Await(2));
  for (Responder& responder : parked_.Take()) std::move(responder).Reply(Body("answer"));
  auto reply = second.Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "answer");
  EXPECT_TRUE(Eventually([&] { return returned.load() == 1; }));
}

TEST_P(AgentRetryTest, TheCopyIsOfTheTimeOfTheCall) {
  Agent& a = Start("a");
  Agent& b = StartFull("b");
  Introduce(a, b);
  ServeEcho(b);
  auto first = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  at::Tensor copied = at::ones({100000});
  Payload request = Body("");
  request.tensors.push_back(Copy(copied));
  auto second = a.Call("b", {"echo"}, std::move(request), Again());
  copied.fill_(7);
  for (Responder& responder : parked_.Take()) std::move(responder).Reply(Body(""));
  auto reply = second.Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->tensors[0].equal(at::ones({100000})));
}

TEST_P(AgentRetryTest, EndsAfterItsAttemptsAndWithItsTime) {
  Agent& a = Start("a");
  Agent& b = StartFull("b");
  Introduce(a, b);
  auto first = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  absl::Status status = a.Call("b", {"park"}, Body(""), Again(3)).Wait(kHang).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("after 3 attempts: "));
  EXPECT_EQ(GetRan(status), Ran::kNo);
  CallOptions brief = Again();
  brief.timeout = absl::Milliseconds(30);
  status = a.Call("b", {"park"}, Body(""), std::move(brief)).Wait(kHang).status();
  EXPECT_FALSE(status.ok());
  EXPECT_NE(GetRan(status), Ran::kYes);  // Its last attempt may have been under way.
  std::stop_source stop;
  CallOptions stopped = Again();
  stopped.stop = stop.get_token();
  auto third = a.Call("b", {"park"}, Body(""), std::move(stopped));
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(third.Wait(kHang).status()));
  EXPECT_TRUE(parked_.Await(1));
  EXPECT_EQ(parked_.Take().size(), 1u);
}

TEST_P(AgentRetryTest, AnErrorOfTheHandlerIsNotMadeAgain) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  std::atomic<int> ran{0};
  ASSERT_TRUE(b.Register({"fail"}, [&](ServerCall call) {
                 ++ran;
                 std::move(call.responder).Reply(absl::UnavailableError("what it needs is not there"));
               }).ok());
  const absl::Status status = a.Call("b", {"fail"}, Body(""), Again()).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kYes);
  EXPECT_EQ(ran.load(), 1);
}

// Scenario users 29.
TEST_P(AgentRetryTest, GoesToTheNextLifeOfItsPeerIfItMayRunTwice) {
  for (bool safe : {false, true}) {
    SCOPED_TRACE(safe);
    const std::string name = safe ? "safe" : "unsafe";
    Agent& a = Start("a");
    Agent& b = Start(name);
    Introduce(a, b);
    ServePark(b);
    ServeEcho(a);
    CallOptions options = Again();
    options.retry->safe_to_repeat = safe;
    std::atomic<int> received{0};
    options.on_received = [&] { ++received; };
    auto reply = a.Call(name, {"park"}, Body("x"), std::move(options));
    ASSERT_TRUE(parked_.Await(safe ? 2 : 1));
    Stop(name);
    if (!safe) {
      const absl::Status status = reply.Wait(kHang).status();
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_EQ(GetRan(status), Ran::kMaybe);
    } else {
      Agent& next = Start(name);
      ASSERT_TRUE(
          next.Register({"park"}, [](ServerCall call) { std::move(call.responder).Reply(Body("next life")); })
              .ok());
      Introduce(a, next);
      auto answer = reply.Wait(kHang);
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(answer->body, "next life");
    }
    parked_.Take();
    Stop(name);
    Stop("a");
    EXPECT_LE(received.load(), 1);
  }
}

TEST_P(AgentRetryTest, GoesToWhoHasTheAddressNowOnceItIsKnown) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  ServeEcho(b);
  const Peer old{{"b", base::NewIncarnation()}, b.addresses()};
  absl::Notification dead;
  a.OnPeerDead([&](const base::MemberId& id, const absl::Status&) {
    if (id == old.id) dead.Notify();
  });
  a.AddPeer(old);
  auto reply = a.Call("b", {"echo"}, Body("x"), Again(1 << 20));
  ASSERT_TRUE(dead.WaitForNotificationWithTimeout(kHang));
  Introduce(a, b);
  auto answer = reply.Wait(kHang);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->body, "x");
}

TEST_P(AgentRetryTest, RefusesWhatItCannotDo) {
  Agent& a = Start("a");
  auto with = [&](RetryPolicy policy) {
    CallOptions options;
    options.retry = policy;
    return a.Call("a", {"echo"}, Body(""), std::move(options)).Wait(kHang).status();
  };
  for (const RetryPolicy& wrong : {RetryPolicy{0}, RetryPolicy{1, absl::ZeroDuration()},
                                   RetryPolicy{1, absl::Seconds(2), absl::Seconds(1)}}) {
    const absl::Status status = with(wrong);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
  }
  EXPECT_TRUE(absl::IsNotFound(with(RetryPolicy{})));  // No such method.
}

TEST_P(AgentRetryTest, TheEndOfTheAgentEndsItOnce) {
  Agent& a = Start("a");
  Agent& b = StartFull("b");
  Introduce(a, b);
  auto first = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  std::atomic<int> ends{0};
  CallOptions options;
  options.retry = RetryPolicy{1000, absl::Hours(1), absl::Hours(1)};
  options.timeout = absl::InfiniteDuration();
  a.Call("b", {"park"}, Body(""), std::move(options), [&](absl::StatusOr<Received>) { ++ends; });
  Stop("a");
  EXPECT_EQ(ends.load(), 1);
  parked_.Take();
}

}  // namespace
}  // namespace Atoll::rpc
