#include "atoll/rpc/batcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"

namespace Atoll::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class BatcherTest : public AgentTest {
 protected:
  void SetUp() override {
    a_ = &Start("a");
    b_ = &Start("b");
    Introduce(*a_, *b_);
  }
  void Serve(Batcher::Options options, Batcher::BatchHandler handler) {
    auto batcher = Batcher::Create(b_, options, std::move(handler));
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batcher_ = *batcher;
    ASSERT_TRUE(b_->Register({"batch"}, batcher_->handler()).ok());
  }
  // Tells each call its place and the batch's size.
  static void Count(std::vector<ServerCall> calls) {
    const size_t size = calls.size();
    for (size_t i = 0; i < size; ++i) {
      std::move(calls[i].responder).Reply(Body(absl::StrCat(calls[i].request.body, ":", i, "/", size)));
    }
  }
  base::Future<Received> Call(int i, CallOptions options = {}) {
    return a_->Call("b", {"batch"}, Body(absl::StrCat(i)), std::move(options));
  }
  bool AwaitWaiting(size_t count) {
    return Eventually([&] { return batcher_->waiting() == count; });
  }

  Agent* a_ = nullptr;
  Agent* b_ = nullptr;
  std::shared_ptr<Batcher> batcher_;
};
INSTANTIATE_AGENT_TESTS(BatcherTest);

TEST_P(BatcherTest, GathersWholeBatches) {
  Serve({.size = 4, .delay = absl::InfiniteDuration()}, Count);
  std::vector<base::Future<Received>> replies;
  for (int i = 0; i < 40; ++i) replies.push_back(Call(i));
  std::vector<int> places(4, 0);
  for (auto& reply : replies) {
    auto answer = reply.Wait(kHang);
    ASSERT_TRUE(answer.ok()) << answer.status();
    ASSERT_THAT(answer->body, HasSubstr("/4"));
    ++places[static_cast<size_t>(answer->body[answer->body.size() - 3] - '0')];
  }
  EXPECT_THAT(places, ElementsAre(10, 10, 10, 10));
  EXPECT_EQ(batcher_->waiting(), 0u);
}

TEST_P(BatcherTest, APartOfABatchGoesWhenItsTimeIsUp) {
  Serve({.size = 1000, .delay = absl::Milliseconds(1)}, Count);
  for (int round = 0; round < 3; ++round) {
    auto answer = Call(round).Wait(kHang);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->body, absl::StrCat(round, ":0/1"));
  }
}

// Scenario batch_rpc 2.
TEST_P(BatcherTest, FortyWaitOnOneAnswerAndHoldNoThread) {
  Serve({.size = 41, .delay = absl::InfiniteDuration()}, Count);
  ServeEcho(*b_);
  std::vector<base::Future<Received>> replies;
  for (int i = 0; i < 40; ++i) replies.push_back(Call(i));
  ASSERT_TRUE(AwaitWaiting(40));
  // Threads are free for others, with one as with many.
  ASSERT_TRUE(a_->Call("b", {"echo"}, Body("free")).Wait(kHang).ok());
  replies.push_back(Call(40));
  for (auto& reply : replies) EXPECT_TRUE(reply.Wait(kHang).ok());
}

TEST_P(BatcherTest, LeavesOutWhoGaveUp) {
  Serve({.size = 1000, .delay = absl::InfiniteDuration()}, Count);
  std::stop_source stop;
  CallOptions options;
  options.stop = stop.get_token();
  auto stays = Call(0);
  ASSERT_TRUE(AwaitWaiting(1));
  auto leaves = Call(1, std::move(options));
  ASSERT_TRUE(AwaitWaiting(2));
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(leaves.Wait(kHang).status()));
  // The cancellation has arrived once a later call has.
  auto last = Call(2);
  ASSERT_TRUE(AwaitWaiting(3));
  batcher_->Flush();
  EXPECT_EQ(stays.Wait(kHang)->body, "0:0/2");
  EXPECT_EQ(last.Wait(kHang)->body, "2:1/2");
}

TEST_P(BatcherTest, WhatItsHandlerThrowsIsTheAnswerOfAll) {
  Serve({.size = 3, .delay = absl::InfiniteDuration()},
        [](std::vector<ServerCall> calls) { throw std::runtime_error("the whole batch is wrong"); });
  std::vector<base::Future<Received>> replies;
  for (int i = 0; i < 3; ++i) replies.push_back(Call(i));
  for (auto& reply : replies) {
    const absl::Status status = reply.Wait(kHang).status();
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the whole batch is wrong"));
  }
}

// Scenario batch_rpc 14.
TEST_P(BatcherTest, StopAbortsThoseThatWaitAndThoseThatCome) {
  Serve({.size = 1000, .delay = absl::InfiniteDuration()}, Count);
  std::vector<base::Future<Received>> replies;
  for (int i = 0; i < 5; ++i) replies.push_back(Call(i));
  ASSERT_TRUE(AwaitWaiting(5));
  batcher_->Stop("the server goes");
  replies.push_back(Call(5));
  for (auto& reply : replies) {
    const absl::Status status = reply.Wait(kHang).status();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the server goes"));
  }
}

TEST_P(BatcherTest, TheEndOfItsAgentEndsThoseThatWait) {
  Serve({.size = 1000, .delay = absl::InfiniteDuration()}, Count);
  auto reply = Call(0);
  ASSERT_TRUE(AwaitWaiting(1));
  batcher_ = nullptr;
  Stop("b");
  EXPECT_FALSE(reply.Wait(kHang).ok());
}

TEST_P(BatcherTest, RefusesOptionsOutOfRange) {
  for (const Batcher::Options& wrong :
       {Batcher::Options{.size = 0}, Batcher::Options{.size = -1}, Batcher::Options{.size = 2 << 20},
        Batcher::Options{.delay = absl::ZeroDuration()}, Batcher::Options{.delay = -absl::Seconds(1)}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Batcher::Create(b_, wrong, Count).status()));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(Batcher::Create(b_, {}, nullptr).status()));
}

}  // namespace
}  // namespace Atoll::rpc
