// Bursts of small messages: they share what a message costs below, and mean the same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "absl/strings/numbers.h"
#include "agent_fixture.h"
#include "atoll/base/clock.h"

namespace Atoll::rpc {
namespace {

constexpr int kCalls = 100;

class AgentBundleTest : public AgentTest {
 protected:
  // Its clock stands still: all that it posts is one burst.
  Agent& StartHasty(const std::string& name) {
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    options.clock = &clock_;
    return Start(name, std::move(options));
  }
  // Serves "count" on the thread that brings it: the order of arrival.
  void ServeCount(Agent& agent) {
    MethodOptions options;
    options.executor = &inline_;
    ASSERT_TRUE(agent
                    .Register(
                        {"count"},
                        [this](ServerCall call) {
                          int number = -1;
                          EXPECT_TRUE(absl::SimpleAtoi(call.request.body, &number));
                          EXPECT_LT(call.deadline, absl::InfiniteFuture());
                          {
                            absl::MutexLock lock(&mu_);
                            arrived_.push_back(number);
                          }
                          std::move(call.responder).Reply(Body(call.request.body));
                        },
                        options)
                    .ok());
  }
  std::vector<int> arrived() {
    absl::MutexLock lock(&mu_);
    return arrived_;
  }

  // Its agents use what is below.
  void TearDown() override {
    clock_.Advance(absl::Seconds(1));  // Acknowledgements that wait.
    agents_.clear();
  }

  base::FakeClock clock_{absl::Now()};
  base::InlineExecutor inline_;
  absl::Mutex mu_;
  std::vector<int> arrived_ ABSL_GUARDED_BY(mu_);
};
INSTANTIATE_AGENT_TESTS(AgentBundleTest);

TEST_P(AgentBundleTest, ABurstTravelsInFewMessagesAndInItsOrder) {
  Agent& a = StartHasty("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeCount(b);
  ServeEcho(b);
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  // The loop comes to it when all calls are made.
  absl::Notification held, go;
  a.endpoint()->Defer([&] {
    held.Notify();
    go.WaitForNotification();
  });
  ASSERT_TRUE(held.WaitForNotificationWithTimeout(kHang));
  const uint64_t before = network_->messages();
  std::vector<base::Future<Received>> replies;
  for (int i = 0; i < kCalls; ++i) replies.push_back(a.Call("b", {"count"}, Body(absl::StrCat(i))));
  go.Notify();
  for (int i = 0; i < kCalls; ++i) {
    auto reply = replies[i].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, absl::StrCat(i));
  }
  std::vector<int> all(kCalls);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(arrived(), all);
  // Those before it is a burst, and the rest as one; the answers are b's, whose clock goes on.
  if (fake()) EXPECT_LT(network_->messages() - before, kCalls + kCalls / 10 + 2u);
}

TEST_P(AgentBundleTest, LargeOnesAndTensorsAmongThemArriveToo) {
  Agent& a = StartHasty("a");
  Agent& b = StartHasty("b");
  Introduce(a, b);
  ServeEcho(b);
  std::vector<base::Future<Received>> replies;
  std::vector<base::Future<base::Unit>> taken;
  for (int i = 0; i < kCalls; ++i) {
    Payload request = Body(std::string(i % 7 == 3 ? 70000 : 10, 'x') + absl::StrCat(i));
    if (i % 3 == 0) request.tensors.push_back(Copy(at::full({i % 2 == 0 ? 4 : 50000}, i)));
    replies.push_back(a.Call("b", {"echo"}, std::move(request)));
    taken.push_back(a.Send("b", {"echo"}, Body("one way")));
  }
  for (int i = 0; i < kCalls; ++i) {
    auto reply = replies[i].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, std::string(i % 7 == 3 ? 70000 : 10, 'x') + absl::StrCat(i));
    ASSERT_EQ(reply->tensors.size(), i % 3 == 0 ? 1u : 0u);
    if (i % 3 == 0) EXPECT_TRUE(reply->tensors[0].equal(at::full({i % 2 == 0 ? 4 : 50000}, i)));
    EXPECT_TRUE(taken[i].Wait(kHang).ok());
  }
}

}  // namespace
}  // namespace Atoll::rpc
