// Calls that their callers give up, and callers that wait for room.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <stop_token>
#include <thread>

#include "agent_fixture.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::HasSubstr;

class AgentStopTest : public AgentTest {
 protected:
  // `agent` serves "hold": the call waits here, and tells when it is asked to stop.
  void ServeHold(Agent& agent) {
    ASSERT_TRUE(agent
                    .Register({"hold"},
                              [this](ServerCall call) {
                                on_stop_.emplace(call.stop, [this] { asked_.Notify(); });
                                cancelled_ = call.cancelled;
                                parked_.Park(std::move(call.responder));
                              })
                    .ok());
  }

  CallOptions Until(const std::stop_source& stop) {
    CallOptions options;
    options.stop = stop.get_token();
    return options;
  }

  absl::Notification asked_;
  std::function<bool()> cancelled_;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};
INSTANTIATE_AGENT_TESTS(AgentStopTest);

TEST_P(AgentStopTest, EndsTheCallAndAsksItsHandlerToStop) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeHold(b);
  std::stop_source stop;
  auto reply = a.Call("b", {"hold"}, Body(""), Until(stop));
  ASSERT_TRUE(parked_.Await(1));
  EXPECT_FALSE(asked_.HasBeenNotified());
  EXPECT_FALSE(cancelled_());
  stop.request_stop();
  const absl::Status status = reply.Wait(kHang).status();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("hold v1"));
  EXPECT_EQ(GetRan(status), Ran::kMaybe);
  ASSERT_TRUE(asked_.WaitForNotificationWithTimeout(kHang));
  EXPECT_TRUE(cancelled_());
  parked_.Take();  // An answer that nobody waits for.
  on_stop_.reset();
}

TEST_P(AgentStopTest, OfACallToOurselvesToo) {
  Agent& a = Start("a");
  ServeHold(a);
  std::stop_source stop;
  auto reply = a.Call("a", {"hold"}, Body(""), Until(stop));
  ASSERT_TRUE(parked_.Await(1));
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(reply.Wait(kHang).status()));
  ASSERT_TRUE(asked_.WaitForNotificationWithTimeout(kHang));
  EXPECT_TRUE(cancelled_());
  on_stop_.reset();
}

TEST_P(AgentStopTest, AskedBeforeItNeverLeaves) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  std::atomic<int> ran{0};
  for (Agent* agent : {&a, &b}) {
    ASSERT_TRUE(agent->Register({"count"}, [&](ServerCall) { ++ran; }).ok());
  }
  std::stop_source stop;
  stop.request_stop();
  for (const char* to : {"b", "a"}) {
    SCOPED_TRACE(to);
    absl::Notification returned;
    Payload request = Body("");
    request.tensors.push_back(Lend(at::ones({4}), [&] { returned.Notify(); }));
    const absl::Status status = a.Call(to, {"count"}, std::move(request), Until(stop)).Wait(kHang).status();
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
    EXPECT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
  }
  EXPECT_EQ(ran.load(), 0);
}

TEST_P(AgentStopTest, GoesOnToTheCallsThatTheHandlerMakes) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Agent& c = Start("c");
  Introduce(a, b);
  Introduce(b, c);
  ServeHold(c);
  absl::Mutex mu;
  absl::Status nested;
  absl::Notification ended;
  ASSERT_TRUE(b.Register({"forward"}, [&](ServerCall call) {
                 CallOptions options;
                 options.stop = call.stop;
                 auto responder = std::make_shared<Responder>(std::move(call.responder));
                 b.Call("c", {"hold"}, Body(""), std::move(options),
                        [&, responder](absl::StatusOr<Received> reply) {
                          absl::MutexLock lock(&mu);
                          nested = reply.status();
                          std::move(*responder).Reply(reply.status());
                          ended.Notify();
                        });
               }).ok());
  std::stop_source stop;
  auto reply = a.Call("b", {"forward"}, Body(""), Until(stop));
  ASSERT_TRUE(parked_.Await(1));
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(reply.Wait(kHang).status()));
  ASSERT_TRUE(asked_.WaitForNotificationWithTimeout(kHang));
  ASSERT_TRUE(ended.WaitForNotificationWithTimeout(kHang));
  absl::MutexLock lock(&mu);
  EXPECT_TRUE(absl::IsCancelled(nested)) << nested;
  on_stop_.reset();
}

TEST_P(AgentStopTest, TheEndOfTheCallerAsksToo) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeHold(b);
  auto reply = a.Call("b", {"hold"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  Stop("a");
  ASSERT_TRUE(asked_.WaitForNotificationWithTimeout(kHang));
  on_stop_.reset();
}

// Scenario users 13.
TEST_P(AgentStopTest, AnAnswerAndAStopAndADeadlineAtOnceEndACallOnce) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  constexpr int kCalls = 2000;
  std::atomic<int> ends{0}, double_ends{0};
  for (int i = 0; i < kCalls; ++i) {
    std::stop_source stop;
    CallOptions options = Until(stop);
    options.timeout = absl::Microseconds(20 + i % 200);
    auto seen = std::make_shared<std::atomic<int>>(0);
    a.Call("b", {"echo"}, Body("x"), std::move(options), [&, seen](absl::StatusOr<Received>) {
      if (seen->fetch_add(1) != 0) ++double_ends;
      ++ends;
    });
    stop.request_stop();
  }
  EXPECT_TRUE(Eventually([&] { return ends.load() == kCalls; })) << ends.load();
  EXPECT_EQ(double_ends.load(), 0);
}

// The requests' arrival.

// Scenario users 30.
TEST_P(AgentStopTest, ArrivalIsToldBeforeAnAnswerThatComesLater) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  ServePark(a);
  for (const char* to : {"a", "b"}) {
    absl::Notification received;
    CallOptions options;
    options.on_received = [&] { received.Notify(); };
    auto reply = a.Call(to, {"park"}, Body(""), std::move(options));
    ASSERT_TRUE(received.WaitForNotificationWithTimeout(kHang)) << to;
    EXPECT_FALSE(reply.ready());
    ASSERT_TRUE(parked_.Await(to[0] == 'a' ? 1 : 2));
    for (Responder& responder : parked_.Take()) std::move(responder).Reply(Body("done"));
    EXPECT_TRUE(reply.Wait(kHang).ok());
  }
}

// Room.

TEST_P(AgentStopTest, CallsBeyondTheLimitFailOrWait) {
  AgentOptions options;
  options.worker_threads = GetParam().threads;
  options.max_calls_in_flight = 2;
  Agent& a = Start("a", options);
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  auto first = a.Call("b", {"park"}, Body("1"));
  auto second = a.Call("b", {"park"}, Body("2"));
  const absl::Status third = a.Call("b", {"park"}, Body("3")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsResourceExhausted(third)) << third;
  EXPECT_THAT(std::string(third.message()), HasSubstr("2 calls to this member are not answered yet"));
  EXPECT_EQ(GetRan(third), Ran::kNo);

  CallOptions brief;
  brief.wait_for_room = true;
  brief.timeout = absl::Milliseconds(20);
  const absl::Status late = a.Call("b", {"park"}, Body("4"), std::move(brief)).Wait(kHang).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("no room"));
  EXPECT_EQ(GetRan(late), Ran::kNo);

  std::stop_source stop;
  absl::Status stopped, answered;
  std::thread stops([&] {
    CallOptions waiting = Until(stop);
    waiting.wait_for_room = true;
    stopped = a.Call("b", {"park"}, Body("5"), std::move(waiting)).Wait(kHang).status();
  });
  stop.request_stop();
  stops.join();
  EXPECT_TRUE(absl::IsCancelled(stopped)) << stopped;
  EXPECT_EQ(GetRan(stopped), Ran::kNo);

  std::thread waits([&] {
    CallOptions waiting;
    waiting.wait_for_room = true;
    answered = a.Call("b", {"park"}, Body("6"), std::move(waiting)).Wait(kHang).status();
  });
  ASSERT_TRUE(parked_.Await(2));
  for (Responder& responder : parked_.Take()) std::move(responder).Reply(Body(""));
  ASSERT_TRUE(parked_.Await(3));
  for (Responder& responder : parked_.Take()) std::move(responder).Reply(Body(""));
  waits.join();
  EXPECT_TRUE(answered.ok()) << answered;
  EXPECT_TRUE(first.Wait(kHang).ok());
  EXPECT_TRUE(second.Wait(kHang).ok());
}

// Scenario users 42.
TEST_P(AgentStopTest, CallersThatWaitKeepTheBytesInFlightWithinTheWindow) {
  constexpr size_t kBytes = 256 << 10;
  constexpr int kCalls = 48;
  AgentOptions options;
  options.worker_threads = GetParam().threads;
  options.window_bytes = 4 * (kBytes + 4096);
  options.queue_bytes = 1;  // What does not wait, fails.
  Agent& a = Start("a", options);
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  std::atomic<int> failed{0}, ended{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < kCalls / 3; ++i) {
        CallOptions waiting;
        waiting.wait_for_room = true;
        Payload request;
        request.tensors.push_back(Copy(at::zeros({static_cast<int64_t>(kBytes)}, at::kByte)));
        a.Call("b", {"echo"}, std::move(request), std::move(waiting), [&](absl::StatusOr<Received> reply) {
          failed += !reply.ok();
          ++ended;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  ASSERT_TRUE(Eventually([&] { return ended.load() == kCalls; }));
  EXPECT_EQ(failed.load(), 0);  // None was posted before there was room.
}

}  // namespace
}  // namespace Atoll::rpc
