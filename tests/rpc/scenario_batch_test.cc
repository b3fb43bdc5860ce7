// Calls that are gathered and answered together: docs/scenarios/batch_rpc.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <stop_token>
#include <thread>

#include <ATen/ops/tensor.h>

#include "atoll/rpc/batcher.h"
#include "scenario_fixture.h"

namespace Atoll::rpc {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// worker0 serves batches, the others are its trainers.
class ScenarioBatchTest : public ScenarioTest {
 protected:
  void SetUp() override { StartWorkers(4); }
  void Serve(Batcher::Options options, Batcher::BatchHandler handler) {
    auto batcher = Batcher::Create(&W(0), options, std::move(handler));
    ASSERT_TRUE(batcher.ok()) << batcher.status();
    batcher_ = *batcher;
    ASSERT_TRUE(W(0).Register({"batch"}, batcher_->handler()).ok());
  }
  base::Future<Received> Push(int rank, Payload request) {
    return W(rank).Call("worker0", {"batch"}, std::move(request));
  }
  static Payload Gradient(at::Tensor gradient) {
    Payload request;
    request.tensors.push_back(Copy(std::move(gradient)));
    return request;
  }
  bool AwaitWaiting(size_t count) {
    return Eventually([&] { return batcher_->waiting() == count; });
  }

  std::shared_ptr<Batcher> batcher_;
};
INSTANTIATE_AGENT_TESTS(ScenarioBatchTest);

// Scenario batch_rpc 1.
TEST_P(ScenarioBatchTest, AServerThatAveragesAndStepsOnceARound) {
  int round = 0;
  at::Tensor parameter = at::zeros({2}), momentum = at::zeros({2});
  Serve({.size = 3, .delay = absl::InfiniteDuration()}, [&](std::vector<ServerCall> calls) {
    at::Tensor gradient = at::zeros({2});
    for (const ServerCall& call : calls) gradient.add_(call.request.tensors[0]);
    momentum = momentum.mul(0.9).add(gradient.div(static_cast<double>(calls.size())));
    parameter = parameter.sub(momentum.mul(0.1));
    ++round;
    for (ServerCall& call : calls) {
      Payload reply = Gradient(parameter);
      reply.body = absl::StrCat(round);
      std::move(call.responder).Reply(std::move(reply));
    }
  });
  constexpr double kExpected[] = {-0.2, -0.78, -1.902, -3.7118};
  std::vector<std::thread> trainers;
  for (int rank = 1; rank <= 3; ++rank) {
    trainers.emplace_back([&, rank] {
      for (int k = 0; k < 4; ++k) {
        absl::StatusOr<Received> reply =
            Push(rank, Gradient(at::full({2}, rank * (k + 1), at::kFloat))).Wait(kHang);
        ASSERT_TRUE(reply.ok()) << reply.status();
        EXPECT_EQ(reply->body, absl::StrCat(k + 1));
        for (int i : {0, 1}) {
          EXPECT_NEAR(reply->tensors[0][i].item<double>(), kExpected[k], 4e-6);
        }
      }
    });
  }
  for (std::thread& trainer : trainers) trainer.join();
}

// Scenario batch_rpc 2.
TEST_P(ScenarioBatchTest, FortyHandlersWaitForOneValueAndHoldNoThread) {
  base::Promise<int> all;
  std::atomic<int> came{0};
  ASSERT_TRUE(W(0).Register({"count"},
                            [&](ServerCall call) {
                              all.future().Then([responder = std::move(call.responder)](
                                                    const absl::StatusOr<int>& count) mutable {
                                std::move(responder).Reply(Body(absl::StrCat(*count)));
                              });
                              if (++came == 40) all.Set(40);
                            })
                  .ok());
  std::vector<base::Future<Received>> calls;
  for (int i = 0; i < 40; ++i) calls.push_back(W(1 + i % 3).Call("worker0", {"count"}, Payload()));
  for (auto& call : calls) {
    absl::StatusOr<Received> reply = call.Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, "40");
  }
}

// Scenario batch_rpc 3. Ours: a wait says that it is one, so others are served meanwhile; and who gave up ends it.
TEST_P(ScenarioBatchTest, HandlersThatWaitDoNotHoldUpTheRest) {
  base::Promise<int> never;
  std::atomic<int> came{0}, ended{0};
  ASSERT_TRUE(W(0).Register({"wait"},
                            [&](ServerCall call) {
                              ++came;
                              base::Promise<int> over;
                              const std::stop_callback given_up(
                                  call.stop, [&] { over.Set(absl::CancelledError("its caller gave up")); });
                              EXPECT_TRUE(
                                  absl::IsCancelled(over.future().Wait(absl::InfiniteDuration()).status()));
                              ++ended;
                            })
                  .ok());
  ASSERT_TRUE(W(0).Register({"wait.on"},
                            [&](ServerCall call) {
                              ++came;
                              EXPECT_TRUE(never.future().Wait(absl::InfiniteDuration()).ok());
                              ++ended;
                            })
                  .ok());
  for (const char* method : {"wait", "wait.on"}) {
    std::vector<base::Future<Received>> calls;
    std::stop_source stop;
    came = ended = 0;
    for (int i = 0; i < 40; ++i) {
      CallOptions options;
      options.stop = stop.get_token();
      calls.push_back(W(1 + i % 3).Call("worker0", {method}, Payload(), std::move(options)));
    }
    ASSERT_TRUE(Eventually([&] { return came == 40; })) << came;
    // All wait, and nobody has given up yet.
    EXPECT_TRUE(Add(W(1), "worker0", at::ones({1}), 1).equal(at::full({1}, 2.0f)));
    stop.request_stop();
    for (auto& call : calls) EXPECT_TRUE(absl::IsCancelled(call.Wait(kHang).status()));
    EXPECT_TRUE(Add(W(1), "worker0", at::ones({1}), 1).equal(at::full({1}, 2.0f)));
    if (method == std::string("wait.on")) {
      EXPECT_EQ(ended, 0);
      never.Set(1);
    }
    EXPECT_TRUE(Eventually([&] { return ended == 40; })) << ended;
    EXPECT_TRUE(Add(W(1), "worker0", at::ones({1}), 1).equal(at::full({1}, 2.0f)));
  }
}

// Scenario batch_rpc 3. As the row has it: the callers' deadlines.
TEST_P(ScenarioBatchTest, ACallersDeadlineEndsTheWaitOfItsHandler) {
  std::atomic<int> came{0}, ended{0};
  ASSERT_TRUE(W(0).Register({"wait"},
                            [&](ServerCall call) {
                              ++came;
                              base::Promise<int> over;
                              const std::stop_callback given_up(
                                  call.stop, [&] { over.Set(absl::CancelledError("its caller gave up")); });
                              over.future().Wait(absl::InfiniteDuration()).IgnoreError();
                              ++ended;
                            })
                  .ok());
  std::vector<base::Future<Received>> calls;
  for (int i = 0; i < 40; ++i) {
    CallOptions options;
    options.timeout = absl::Milliseconds(20);
    calls.push_back(W(1 + i % 3).Call("worker0", {"wait"}, Payload(), std::move(options)));
  }
  for (auto& call : calls) {
    const absl::Status status = call.Wait(kHang).status();
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  }
  EXPECT_TRUE(Add(W(1), "worker0", at::ones({1}), 1).equal(at::full({1}, 2.0f)));
  Stop("worker0");  // Which its handlers end before.
  EXPECT_EQ(ended, came);
}

// Scenario batch_rpc 5.
TEST_P(ScenarioBatchTest, WhoComesWhileARoundIsAnsweredIsInTheNext) {
  std::atomic<int> round{0};
  std::optional<base::Future<Received>> late;
  Serve({.size = 2, .delay = absl::InfiniteDuration()}, [&](std::vector<ServerCall> calls) {
    const int mine = ++round;
    if (mine == 1) {
      late = Push(3, Body("late"));
      const base::ThreadPool::BlockingScope waits;  // The late one needs a thread, too.
      EXPECT_TRUE(AwaitWaiting(1));
    }
    for (ServerCall& call : calls) {
      std::move(call.responder).Reply(Body(absl::StrCat(call.request.body, ":", mine)));
    }
  });
  auto first = Push(1, Body("first"));
  auto second = Push(2, Body("second"));
  EXPECT_EQ(first.Wait(kHang)->body, "first:1");
  EXPECT_EQ(second.Wait(kHang)->body, "second:1");
  EXPECT_FALSE(late->ready());
  auto next = Push(1, Body("next"));
  EXPECT_EQ(late->Wait(kHang)->body, "late:2");
  EXPECT_EQ(next.Wait(kHang)->body, "next:2");
}

// Scenario batch_rpc 6. Each gradient is in one batch; batches that are handled at the same time add under a lock.
TEST_P(ScenarioBatchTest, EveryGradientCountsOnceWhoeverAddsIt) {
  absl::Mutex mu;
  at::Tensor total = at::zeros({2}, at::kDouble);
  Serve({.size = 4, .delay = absl::Milliseconds(1)}, [&](std::vector<ServerCall> calls) {
    at::Tensor sum = at::zeros({2}, at::kDouble);
    for (const ServerCall& call : calls) sum.add_(call.request.tensors[0]);
    {
      absl::MutexLock lock(&mu);
      total.add_(sum);
    }
    for (ServerCall& call : calls) std::move(call.responder).Reply(Payload());
  });
  std::vector<base::Future<Received>> calls;
  double expected = 0;
  for (int i = 0; i < 300; ++i) {
    calls.push_back(Push(1 + i % 3, Gradient(at::full({2}, i, at::kDouble))));
    expected += i;
  }
  for (auto& call : calls) ASSERT_TRUE(call.Wait(kHang).ok());
  absl::MutexLock lock(&mu);
  EXPECT_TRUE(total.equal(at::full({2}, expected, at::kDouble)));
}

// Scenario batch_rpc 9 and 10.
TEST_P(ScenarioBatchTest, AFanOutKeepsItsOrderAndFailsOnce) {
  for (Agent* agent : {&W(1), &W(2), &W(3)}) ServePark(*agent);
  std::atomic<int> answers{0};
  ASSERT_TRUE(W(0).Register({"fan.out"},
                            [&](ServerCall call) {
                              std::vector<base::Future<Values>> sums;
                              for (int i = 0; i < 9; ++i) {
                                sums.push_back(AddAsync(W(0), NameOfWorker(1 + i % 3), at::ones({2}), i));
                              }
                              base::WhenAll(sums).Then(
                                  [responder = std::move(call.responder)](
                                      const absl::StatusOr<std::vector<Values>>& all) mutable {
                                    if (!all.ok()) return std::move(responder).Reply(all.status());
                                    Payload reply;
                                    for (const Values& one : *all)
                                      reply.tensors.push_back(Copy(one[0].toTensor()));
                                    std::move(responder).Reply(std::move(reply));
                                  });
                            })
                  .ok());
  absl::StatusOr<Received> sums = W(1).Call("worker0", {"fan.out"}, Payload()).Wait(kHang);
  ASSERT_TRUE(sums.ok()) << sums.status();
  ASSERT_EQ(sums->tensors.size(), 9u);
  for (int i = 0; i < 9; ++i) {
    EXPECT_TRUE(sums->tensors[static_cast<size_t>(i)].equal(at::full({2}, i + 1.0f))) << i;
  }
  // Two of three branches fail, one after the other; the third is never answered.
  ASSERT_TRUE(W(0).Register({"fan.out.badly"},
                            [&](ServerCall call) {
                              std::vector<base::Future<Received>> branches;
                              for (int i = 1; i <= 3; ++i) {
                                branches.push_back(W(0).Call(NameOfWorker(i), {"park"}, Payload()));
                              }
                              base::WhenAll(branches).Then(
                                  [&answers, responder = std::move(call.responder)](const auto& all) mutable {
                                    ++answers;
                                    std::move(responder).Reply(all.status());
                                  });
                            })
                  .ok());
  auto failed = W(1).Call("worker0", {"fan.out.badly"}, Payload());
  ASSERT_TRUE(parked_.Await(3));
  std::vector<Responder> branches = parked_.Take();
  std::move(branches[1]).Reply(absl::OutOfRangeError("the first to fail"));
  const absl::Status status = failed.Wait(kHang).status();
  EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("the first to fail"), HasSubstr("fan.out.badly v1 on worker0")));
  std::move(branches[2]).Reply(absl::OutOfRangeError("the second"));
  std::move(branches[0]).Reply(Payload());
  for (Agent* agent : {&W(1), &W(2), &W(3)}) EXPECT_TRUE(agent->Shutdown(kHang).ok());
  EXPECT_TRUE(W(0).Shutdown(kHang).ok());
  EXPECT_EQ(answers, 1);
}

// Averages what there is, and says of how many.
void Average(std::vector<ServerCall> calls) {
  at::Tensor sum = at::zeros({2});
  for (const ServerCall& call : calls) sum.add_(call.request.tensors[0]);
  for (ServerCall& call : calls) {
    Payload reply = Body(absl::StrCat(calls.size()));
    reply.tensors.push_back(Copy(sum.div(static_cast<double>(calls.size()))));
    std::move(call.responder).Reply(std::move(reply));
  }
}

// Scenario batch_rpc 13. The round has a deadline of its own.
TEST_P(ScenarioBatchTest, ARoundWithoutADeadTrainerIsAveragedOverTheRest) {
  Serve({.size = 3, .delay = absl::Milliseconds(20)}, Average);
  // One that never came.
  auto first = Push(1, Gradient(at::full({2}, 1.0f)));
  auto second = Push(2, Gradient(at::full({2}, 3.0f)));
  // On a busy machine they may come too far apart for one round: then each is a round.
  absl::StatusOr<Received> of_first = first.Wait(kHang), of_second = second.Wait(kHang);
  ASSERT_TRUE(of_first.ok()) << of_first.status();
  ASSERT_TRUE(of_second.ok()) << of_second.status();
  EXPECT_EQ(of_first->body, of_second->body);
  if (of_first->body == "2") {
    EXPECT_TRUE(of_first->tensors[0].equal(at::full({2}, 2.0f)));
    EXPECT_TRUE(of_second->tensors[0].equal(at::full({2}, 2.0f)));
  }
}

// Scenario batch_rpc 13. One that came, and died.
TEST_P(ScenarioBatchTest, WhatADeadTrainerGaveIsLeftOut) {
  Serve({.size = 3, .delay = absl::InfiniteDuration()}, Average);
  auto dead = Push(3, Gradient(at::full({2}, 100.0f)));
  ASSERT_TRUE(AwaitWaiting(1));
  const base::MemberId id = W(3).self();
  W(3).endpoint()->Close();  // Without a farewell.
  ASSERT_TRUE(Eventually([&] { return !W(0).FindPeer("worker3").has_value(); }));
  auto first = Push(1, Gradient(at::full({2}, 1.0f)));
  auto second = Push(2, Gradient(at::full({2}, 3.0f)));
  for (auto* reply : {&first, &second}) {
    absl::StatusOr<Received> average = reply->Wait(kHang);
    ASSERT_TRUE(average.ok()) << average.status();
    EXPECT_EQ(average->body, "2");
    EXPECT_TRUE(average->tensors[0].equal(at::full({2}, 2.0f)));
  }
  EXPECT_FALSE(dead.Wait(kHang).ok());
}

// Scenario batch_rpc 14.
TEST_P(ScenarioBatchTest, TheEndOfAServerAbortsWhoWaits) {
  Serve({.size = 1000, .delay = absl::InfiniteDuration()}, Average);
  std::vector<base::Future<Received>> calls;
  for (int i = 0; i < 40; ++i) calls.push_back(Push(1 + i % 3, Gradient(at::ones({2}))));
  ASSERT_TRUE(AwaitWaiting(40));
  batcher_->Stop("the server ends");
  EXPECT_TRUE(W(0).Shutdown(kHang).ok());
  for (auto& call : calls) {
    const absl::Status status = call.Wait(kHang).status();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_THAT(Text(status), HasSubstr("the server ends"));
  }
}

}  // namespace
}  // namespace Atoll::rpc
