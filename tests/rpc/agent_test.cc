#include "atoll/rpc/agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::HasSubstr;

INSTANTIATE_AGENT_TESTS(AgentTest);

// Scenario users 4.
TEST_P(AgentTest, CallsAndAnswers) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  auto reply = a.Call("b", {"echo"}, Body("hello")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "hello");
  EXPECT_TRUE(reply->tensors.empty());
}

TEST_P(AgentTest, CarriesTensorsOfEverySizeAndDtype) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  std::vector<at::Tensor> tensors = {
      at::arange(10, at::kFloat),
      at::ones({}, at::kDouble),                                // 0-dim
      at::empty({0, 5}, at::kInt),                              // empty
      at::arange(12, at::kLong).reshape({3, 4}).t(),            // not contiguous
      at::arange(300000, at::kFloat),                           // on its own
      at::arange(600000, at::kFloat).reshape({1000, 600}).t(),  // on its own, not contiguous
      at::ones({7}, at::kBool),
      at::ones({3, 3}, at::kBFloat16),
      at::ones({3}, at::kHalf),
      at::ones({100000}, at::kComplexDouble),
      at::ones({5}, at::kByte),
  };
  Payload request = Body("x");
  for (const at::Tensor& tensor : tensors) request.tensors.push_back(Copy(tensor));
  auto reply = a.Call("b", {"echo"}, std::move(request)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  ASSERT_EQ(reply->tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(reply->tensors[i].scalar_type(), tensors[i].scalar_type());
    EXPECT_EQ(reply->tensors[i].sizes(), tensors[i].sizes());
    EXPECT_TRUE(reply->tensors[i].equal(tensors[i])) << i;
  }
}

TEST_P(AgentTest, BothDirectionsAtOnceFromColdStart) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(a);
  ServeEcho(b);
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 50; ++i) {
    futures.push_back(a.Call("b", {"echo"}, Body(absl::StrCat(i))));
    futures.push_back(b.Call("a", {"echo"}, Body(absl::StrCat(i))));
  }
  for (int i = 0; i < 100; ++i) {
    auto reply = futures[i].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, absl::StrCat(i / 2));
  }
}

TEST_P(AgentTest, TheCalleeNeedsNoIntroduction) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  a.AddPeer({b.self(), b.addresses()});
  ServeEcho(a);
  ServeEcho(b);
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("1")).Wait(kHang).ok());
  // It has learned the caller's name and address by that.
  ASSERT_TRUE(b.Call("a", {"echo"}, Body("2")).Wait(kHang).ok());
  ASSERT_TRUE(b.FindPeer("a").has_value());
  EXPECT_EQ(b.FindPeer("a")->addresses, a.addresses());
}

TEST_P(AgentTest, MeetsByAddress) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  ServeEcho(b);
  auto met = a.Meet(b.addresses(), kHang).Wait(kHang);
  ASSERT_TRUE(met.ok()) << met.status();
  EXPECT_EQ(*met, b.self());
  EXPECT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
}

// Scenario rpc 30.
TEST_P(AgentTest, CallbackFormRunsOnThePool) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  absl::Notification done;
  a.Call("b", {"echo"}, Body("cb"), {}, [&](absl::StatusOr<Received> reply) {
    EXPECT_TRUE(reply.ok());
    EXPECT_EQ(reply->body, "cb");
    // It may wait: it is on the pool.
    EXPECT_TRUE(a.Call("b", {"echo"}, Body("inner")).Wait(kHang).ok());
    done.Notify();
  });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kHang));
}

// Scenario users 30.
TEST_P(AgentTest, OneWayCompletesWhenReceived) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  absl::Notification ran;
  std::atomic<int> count{0};
  ASSERT_TRUE(b.Register({"note"}, [&](ServerCall call) {
                 if (call.request.body == "last") ran.Notify();
                 ++count;
               }).ok());
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(a.Send("b", {"note"}, Body("x")).Wait(kHang).ok());
  Payload big = Body("last");
  big.tensors.push_back(Copy(at::ones({1 << 20})));
  ASSERT_TRUE(a.Send("b", {"note"}, std::move(big)).Wait(kHang).ok());
  ASSERT_TRUE(ran.WaitForNotificationWithTimeout(kHang));
  Stop("b");
  EXPECT_EQ(count, 101);
}

TEST_P(AgentTest, DeferredRepliesHoldNoThread) {
  Agent& a = Start("a");
  AgentOptions one;
  one.worker_threads = 1;
  Agent& b = Start("b", one);
  Introduce(a, b);
  absl::Mutex mu;
  std::vector<Responder> parked;
  ASSERT_TRUE(b.Register({"park"}, [&](ServerCall call) {
                 std::vector<Responder> release;
                 {
                   absl::MutexLock lock(&mu);
                   parked.push_back(std::move(call.responder));
                   if (parked.size() == 100) release.swap(parked);
                 }
                 for (Responder& responder : release) std::move(responder).Reply(Body("go"));
               }).ok());
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 100; ++i) futures.push_back(a.Call("b", {"park"}, Body("")));
  for (auto& future : futures) {
    auto reply = future.Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, "go");
  }
}

TEST_P(AgentTest, SelfCalls) {
  Agent& a = Start("a");
  ServeEcho(a);
  uint64_t connects = network_->connects();
  at::Tensor tensor = at::arange(100000, at::kFloat);
  at::Tensor into = at::zeros({100000}, at::kFloat);
  Payload request = Body("me");
  request.tensors.push_back(Copy(tensor));
  CallOptions options;
  options.reply_into = {into};
  auto reply = a.Call("a", {"echo"}, std::move(request), options).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "me");
  EXPECT_TRUE(into.equal(tensor));
  EXPECT_EQ(reply->tensors[0].data_ptr(), into.data_ptr());
  EXPECT_EQ(network_->connects(), connects);
  auto missing = a.Call("a", {"nothing"}, Body("")).Wait(kHang);
  EXPECT_TRUE(absl::IsNotFound(missing.status()));
  EXPECT_EQ(GetRan(missing.status()), Ran::kNo);
  EXPECT_TRUE(a.Send("a", {"echo"}, Body("")).Wait(kHang).ok());
  ServePark(a);
  CallOptions soon;
  soon.timeout = absl::Milliseconds(20);
  auto late = a.Call("a", {"park"}, Body(""), soon).Wait(kHang);
  EXPECT_TRUE(absl::IsDeadlineExceeded(late.status())) << late.status();
}

// Scenario rpc 33.
TEST_P(AgentTest, NestedCallsWithOneThreadEach) {
  AgentOptions one;
  one.worker_threads = 1;
  Agent& a = Start("a", one);
  Agent& b = Start("b", one);
  Introduce(a, b);
  // Each calls the other until the depth is used up.
  auto serve = [](Agent& self, std::string other) {
    ASSERT_TRUE(self.Register({"down"},
                              [&self, other](ServerCall call) {
                                int depth = std::stoi(call.request.body);
                                if (depth == 0) return std::move(call.responder).Reply(Body("bottom"));
                                auto inner =
                                    self.Call(other, {"down"}, Body(absl::StrCat(depth - 1))).Wait(kHang);
                                if (!inner.ok()) return std::move(call.responder).Reply(inner.status());
                                std::move(call.responder).Reply(Body(inner->body));
                              })
                    .ok());
  };
  serve(a, "b");
  serve(b, "a");
  auto reply = a.Call("b", {"down"}, Body("20")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "bottom");
}

TEST_P(AgentTest, AThousandConcurrentCalls) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 1000; ++i) {
    Payload request = Body(absl::StrCat(i));
    request.tensors.push_back(Copy(at::full({i % 50 == 0 ? 100000 : 10}, i, at::kInt)));
    futures.push_back(a.Call("b", {"echo"}, std::move(request)));
  }
  for (int i = 0; i < 1000; ++i) {
    auto reply = futures[i].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, absl::StrCat(i));
    EXPECT_EQ(reply->tensors[0][3].item<int>(), i);
  }
}

// Scenario users 3.
TEST_P(AgentTest, BlockedHandlersStarveNoDeadline) {
  AgentOptions one;
  one.worker_threads = 1;
  Agent& a = Start("a", one);
  Agent& b = Start("b", one);
  Introduce(a, b);
  absl::Notification release;
  // Blocks without telling the pool, on both sides.
  std::atomic<int> blocked_at_b{0};
  Handler block = [&](ServerCall call) {
    if (call.caller.name == "a") ++blocked_at_b;
    release.WaitForNotification();
    std::move(call.responder).Reply(Body(""));
  };
  ASSERT_TRUE(a.Register({"block"}, block).ok());
  ASSERT_TRUE(b.Register({"block"}, block).ok());
  auto blocking = b.Call("a", {"block"}, Body(""));
  // A deadline that is long enough for the request to get there, however busy the machine is.
  CallOptions soon;
  soon.timeout = absl::Milliseconds(50);
  int maybe = 0;
  for (; blocked_at_b == 0 && soon.timeout < kHang; soon.timeout = 2 * *soon.timeout) {
    absl::Notification expired;
    a.Call("b", {"block"}, Body(""), soon, [&](absl::StatusOr<Received> reply) {
      EXPECT_TRUE(absl::IsDeadlineExceeded(reply.status())) << reply.status();
      if (GetRan(reply.status()) == Ran::kMaybe) ++maybe;
      EXPECT_THAT(std::string(reply.status().message()), HasSubstr("block v1 on b#"));
      expired.Notify();
    });
    ASSERT_TRUE(expired.WaitForNotificationWithTimeout(2 * kHang));
  }
  EXPECT_EQ(blocked_at_b, 1);
  EXPECT_GE(maybe, 1);
  release.Notify();
  EXPECT_TRUE(blocking.Wait(kHang).ok());
  Stop("a");  // Their handlers look at what ends here.
  Stop("b");
}

TEST_P(AgentTest, ACallThatWasGivenUpIsCancelledAtTheCallee) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  std::atomic<int> started{0}, seen{0};
  ASSERT_TRUE(b.Register({"work"}, [&](ServerCall call) {
                 ++started;
                 parked_.Park(std::move(call.responder));  // Unanswered: the caller sees its deadline.
                 while (!call.cancelled()) std::this_thread::yield();
                 ++seen;
               }).ok());
  // One that is given up before it was sent never gets there.
  CallOptions soon;
  soon.timeout = absl::Milliseconds(30);
  for (; started == 0 && soon.timeout < kHang; soon.timeout = 2 * *soon.timeout) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(a.Call("b", {"work"}, Body(""), soon).Wait(2 * kHang).status()));
  }
  EXPECT_GE(started, 1);
  Stop("b");  // Its handlers have ended then.
  EXPECT_EQ(seen, started);
}

// Scenarios users 18, 148.
TEST_P(AgentTest, ErrorsSayWhoWhereWhatAndWhetherItRan) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ASSERT_TRUE(b.Register({"fail", 2}, [](ServerCall call) {
                 std::move(call.responder).Reply(absl::OutOfRangeError("no such row"));
               }).ok());
  ASSERT_TRUE(b.Register({"drop"}, [](ServerCall call) {}).ok());
  ASSERT_TRUE(b.Register({"throw"}, [](ServerCall call) { throw std::runtime_error("boom"); }).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(b.Register({"drop"}, [](ServerCall) {})));
  EXPECT_TRUE(absl::IsInvalidArgument(b.Register({"Drop!"}, [](ServerCall) {})));

  auto failed = a.Call("b", {"fail", 2}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsOutOfRange(failed));
  EXPECT_EQ(GetRan(failed), Ran::kYes);
  std::string text(failed.message());
  EXPECT_THAT(text, HasSubstr("fail v2"));
  EXPECT_THAT(text, HasSubstr(b.self().ToString()));
  EXPECT_THAT(text, HasSubstr(fake() ? "fake:b" : "unix:@"));
  EXPECT_THAT(text, HasSubstr("no such row"));

  auto version = a.Call("b", {"fail", 1}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsNotFound(version));
  EXPECT_EQ(GetRan(version), Ran::kNo);
  EXPECT_THAT(std::string(version.message()), HasSubstr("serves v2"));

  auto dropped = a.Call("b", {"drop"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsInternal(dropped));
  EXPECT_EQ(GetRan(dropped), Ran::kYes);
  EXPECT_TRUE(absl::IsInternal(a.Call("b", {"throw"}, Body("")).Wait(kHang).status()));

  auto nobody = a.Call("c", {"fail"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsNotFound(nobody));
  EXPECT_EQ(GetRan(nobody), Ran::kNo);
  EXPECT_THAT(std::string(nobody.message()), HasSubstr("fail v1 on c"));

  Payload bad = Body("");
  bad.tensors.push_back(Copy(at::Tensor()));
  auto undefined = a.Call("b", {"drop"}, std::move(bad)).Wait(kHang).status();
  EXPECT_TRUE(absl::IsInvalidArgument(undefined));
  EXPECT_EQ(GetRan(undefined), Ran::kNo);
}

TEST_P(AgentTest, RepliesLandInTheCallersMemory) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  for (int64_t count : {10, 1 << 20}) {
    at::Tensor sent = at::arange(count, at::kFloat);
    at::Tensor into = at::zeros({count}, at::kFloat);
    Payload request = Body("");
    request.tensors.push_back(Copy(sent));
    CallOptions options;
    options.reply_into = {into};
    auto reply = a.Call("b", {"echo"}, std::move(request), options).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->tensors[0].data_ptr(), into.data_ptr());
    EXPECT_TRUE(into.equal(sent));
    // Another dtype, another count, another size: refused, untouched, and the session goes on.
    for (std::vector<at::Tensor> wrong : {std::vector<at::Tensor>{at::zeros({count}, at::kInt)},
                                          std::vector<at::Tensor>{at::zeros({count}), at::zeros({count})},
                                          std::vector<at::Tensor>{at::zeros({count + 1})}}) {
      Payload again = Body("");
      again.tensors.push_back(Copy(sent));
      CallOptions mismatch;
      mismatch.reply_into = wrong;
      auto refused = a.Call("b", {"echo"}, std::move(again), mismatch).Wait(kHang);
      EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
      EXPECT_EQ(wrong[0].count_nonzero().item<int64_t>(), 0);
    }
  }
  CallOptions strided;
  strided.reply_into = {at::zeros({4, 4}).t()};
  EXPECT_TRUE(absl::IsInvalidArgument(a.Call("b", {"echo"}, Body(""), strided).Wait(kHang).status()));
}

TEST_P(AgentTest, RequestsLandWhereTheMethodSays) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  at::Tensor staging = at::zeros({1 << 20}, at::kFloat);
  std::atomic<int> allocations{0};
  MethodOptions options;
  options.allocate = [&](const base::MemberId& caller, absl::string_view body,
                         absl::Span<const TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
    EXPECT_EQ(caller, a.self());
    ++allocations;
    if (body == "no") return absl::ResourceExhaustedError("no room");
    if (body == "wrong") return std::vector<at::Tensor>{at::zeros({3})};
    return std::vector<at::Tensor>{staging.narrow(0, 0, metas[0].sizes[0])};
  };
  std::atomic<int> ran{0};
  ASSERT_TRUE(b.Register(
                   {"push"},
                   [&](ServerCall call) {
                     ++ran;
                     EXPECT_EQ(call.request.tensors[0].data_ptr(), staging.data_ptr());
                     std::move(call.responder).Reply(Body(""));
                   },
                   options)
                  .ok());
  for (int64_t count : {16, 1 << 20}) {
    for (std::string body : {"yes", "no", "wrong"}) {
      Payload request = Body(body);
      request.tensors.push_back(Copy(at::full({count}, 3.0f)));
      auto status = a.Call("b", {"push"}, std::move(request)).Wait(kHang).status();
      EXPECT_EQ(status.ok(), body == "yes") << status;
      EXPECT_EQ(absl::IsResourceExhausted(status), body == "no") << status;
      EXPECT_EQ(GetRan(status) == Ran::kNo, !status.ok());
    }
    EXPECT_EQ(staging[count - 1].item<float>(), 3.0f);
  }
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(allocations, 6);
}

}  // namespace
}  // namespace Atoll::rpc
