// What goes on with answers that come later: docs/scenarios/rpc.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include <ATen/ops/tensor.h>

#include "atoll/rpc/chain.h"
#include "scenario_fixture.h"

namespace Atoll::rpc {
namespace {

using ::testing::HasSubstr;

class ScenarioFuturesTest : public ScenarioTest {
 protected:
  void SetUp() override {
    StartWorkers(3);
    for (Agent* agent : workers_) {
      ServeEcho(*agent);
      ServePark(*agent);
    }
  }
  base::Future<at::Tensor> SumAsync(Agent& from, const std::string& to, c10::IValue x, c10::IValue y) {
    return Chain(AddAsync(from, to, std::move(x), std::move(y)),
                 [](const Values& values) { return values.at(0).toTensor(); });
  }
  void AnswerParked(absl::StatusOr<std::string> with) {
    for (Responder& responder : parked_.Take()) {
      std::move(responder).Reply(with.ok() ? Body(*with) : absl::StatusOr<Payload>(with.status()));
    }
  }
};
INSTANTIATE_AGENT_TESTS(ScenarioFuturesTest);

at::Tensor AddThree(const at::Tensor& tensor) { return tensor.add(3); }

// Scenario rpc 16.
TEST_P(ScenarioFuturesTest, AHandlerThatAnswersWithAChain) {
  ASSERT_TRUE(W(1).Register({"chain"},
                            [this](ServerCall call) {
                              base::Future<at::Tensor> sum =
                                  SumAsync(W(1), "worker2", call.request.tensors[0], 0);
                              for (int i = 0; i < 20; ++i) sum = Chain(sum, AddThree);
                              sum.Then([responder = std::move(call.responder)](
                                           const absl::StatusOr<at::Tensor>& end) mutable {
                                if (!end.ok()) return std::move(responder).Reply(end.status());
                                Payload reply;
                                reply.tensors.push_back(Copy(*end));
                                std::move(responder).Reply(std::move(reply));
                              });
                            })
                  .ok());
  Payload request;
  request.tensors.push_back(Copy(at::ones({1})));
  absl::StatusOr<Received> reply = W(0).Call("worker1", {"chain"}, std::move(request)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->tensors[0].equal(at::full({1}, 61.0f)));
}

template <class F>
concept TakesNothingForACallback = requires(const F& future) {
  future.Then(nullptr);
};

// Scenario rpc 20. A second value is refused by what Set returns; a chain's failure is its end's; no callback at all does
// not compile, and an empty one is none.
TEST_P(ScenarioFuturesTest, ASecondValueAFailingCallbackAndNone) {
  base::Promise<int> promise;
  EXPECT_TRUE(promise.Set(1));
  EXPECT_FALSE(promise.Set(2));
  EXPECT_FALSE(promise.Set(absl::InternalError("late")));
  EXPECT_EQ(*promise.future().Wait(absl::ZeroDuration()), 1);

  std::atomic<int> ran{0};
  base::Future<at::Tensor> chained =
      Chain(Chain(SumAsync(W(0), "worker1", at::ones({1}), 1),
                  [&](const at::Tensor&) -> at::Tensor { throw std::runtime_error("Expected error"); }),
            [&](const at::Tensor& sum) {
              ++ran;
              return sum;
            });
  const absl::Status failed = chained.Wait(kHang).status();
  EXPECT_TRUE(absl::IsInternal(failed)) << failed;
  EXPECT_THAT(Text(failed), HasSubstr("threw std::runtime_error: Expected error"));
  const absl::Status own =
      Chain(SumAsync(W(0), "worker1", at::ones({1}), 1),
            [](const at::Tensor&) { return absl::StatusOr<int>(absl::OutOfRangeError("Expected error")); })
          .Wait(kHang)
          .status();
  EXPECT_EQ(own, absl::OutOfRangeError("Expected error"));
  // An error of the call goes past all of it.
  const absl::Status past = Chain(SumAsync(W(0), "nobody", at::ones({1}), 1),
                                  [&](const at::Tensor& sum) {
                                    ++ran;
                                    return sum;
                                  })
                                .Wait(kHang)
                                .status();
  EXPECT_TRUE(absl::IsNotFound(past)) << past;
  EXPECT_EQ(ran, 0);

  static_assert(!TakesNothingForACallback<base::Future<int>>);
  base::Promise<int> later;
  later.future().Then(absl::AnyInvocable<void(const absl::StatusOr<int>&)>());
  EXPECT_TRUE(later.Set(1));
  later.future().Then(absl::AnyInvocable<void(const absl::StatusOr<int>&)>());
}

// Scenario rpc 21.
TEST_P(ScenarioFuturesTest, AllOfThreeSumsInTheirOrder) {
  std::vector<base::Future<at::Tensor>> sums;
  for (int i = 0; i < 3; ++i) sums.push_back(SumAsync(W(0), NameOfWorker(i), at::ones({1}), i));
  absl::StatusOr<std::vector<at::Tensor>> all = base::WhenAll(sums).Wait(kHang);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 3u);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE((*all)[static_cast<size_t>(i)].equal(at::full({1}, i + 1.0f)));
}

// Scenario rpc 22.
TEST_P(ScenarioFuturesTest, AnErrorEndsTheWaitForAllWhileAnotherIsNotAnswered) {
  ASSERT_TRUE(W(2).Register({"throw"}, [](ServerCall) { throw std::runtime_error("Expected error"); }).ok());
  const std::vector<base::Future<Received>> calls = {W(0).Call("worker1", {"park"}, Body("")),
                                                     W(0).Call("worker2", {"throw"}, Body(""))};
  const absl::Status status = base::WhenAll(calls).Wait(kHang).status();
  EXPECT_THAT(Text(status), HasSubstr("std::runtime_error: Expected error"));
  EXPECT_FALSE(calls[0].ready());
  ASSERT_TRUE(parked_.Await(1));
  AnswerParked("");
  EXPECT_TRUE(calls[0].Wait(kHang).ok());
}

// Scenario rpc 28.
TEST_P(ScenarioFuturesTest, AnAnswerCanBeTakenTwiceAndIsKnownToBeThere) {
  for (const char* to : {"worker1", "worker0"}) {
    for (bool fails : {false, true}) {
      auto call = W(0).Call(to, {"park"}, Body(""));
      const auto copy = call;
      EXPECT_FALSE(call.ready());
      ASSERT_TRUE(Eventually([&] {
        if (fails) {
          AnswerParked(absl::OutOfRangeError("Expected error"));
        } else {
          AnswerParked("once");
        }
        return call.ready();
      }));
      EXPECT_TRUE(copy.ready());
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(absl::IsOutOfRange(call.Wait(kHang).status()), fails);
        EXPECT_EQ(copy.Wait(absl::ZeroDuration()).ok(), !fails);
        if (!fails) {
          EXPECT_EQ(call.Wait(kHang)->body, "once");
        }
      }
    }
  }
}

// Scenario rpc 29.
TEST_P(ScenarioFuturesTest, CallbacksRunInTheirOrderWhateverOneOfThemThrows) {
  auto call = W(0).Call("worker1", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  absl::Mutex mu;
  std::vector<int> order;
  for (int i = 0; i < 10; ++i) {
    call.Then([&, i](const absl::StatusOr<Received>& reply) {
      EXPECT_EQ(reply->body, "value");
      absl::MutexLock lock(&mu);
      order.push_back(i);
      if (i == 3) throw std::runtime_error("the third harms no other");
    });
  }
  AnswerParked("value");
  {
    auto all_ran = [&] { return order.size() == 10; };
    absl::MutexLock lock(&mu);
    ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&all_ran), kHang));
    for (int i = 0; i < 10; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
  }
  bool at_once = false;
  call.Then([&](const absl::StatusOr<Received>&) { at_once = true; });
  EXPECT_TRUE(at_once);
  base::Future<at::Tensor> sum = SumAsync(W(0), "worker1", at::ones({2}), 1);
  for (int i = 0; i < 20; ++i) sum = Chain(sum, [](const at::Tensor& value) { return value.add(1); });
  absl::StatusOr<at::Tensor> end = sum.Wait(kHang);
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->equal(at::full({2}, 22.0f)));
}

// Scenario rpc 30. Also of a call that failed, whose inner one fails too.
TEST_P(ScenarioFuturesTest, ACallbackMayMakeAnotherCallAndWaitForIt) {
  for (const char* to : {"worker1", "worker0", "nobody"}) {
    base::Promise<std::string> inner;
    W(0).Call(to, {"echo"}, Body("x")).Then([this, inner, to](const absl::StatusOr<Received>& outer) {
      absl::StatusOr<Received> reply = W(0).Call(to, {"echo"}, Body("inner")).Wait(kHang);
      EXPECT_EQ(outer.ok(), reply.ok());
      inner.Set(reply.ok() ? absl::StatusOr<std::string>(reply->body) : reply.status());
    });
    absl::StatusOr<std::string> answer = inner.future().Wait(kHang);
    if (to == std::string("nobody")) {
      EXPECT_TRUE(absl::IsNotFound(answer.status())) << answer.status();
    } else {
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(*answer, "inner");
    }
  }
}

// Awaits at its end every call that its agent made since it was there: an interceptor sees them all, whoever makes
// them.
class AwaitsCalls : public Interceptor {
 public:
  absl::Status OnCall(OutgoingCall& call) override {
    if (call.one_way) return absl::OkStatus();
    {
      absl::MutexLock lock(&mu_);
      ++under_way_;
    }
    call.on_reply = [this, inner = std::move(call.on_reply)](absl::StatusOr<Received> reply) mutable {
      const absl::Status status = reply.status();
      std::move(inner)(std::move(reply));
      absl::MutexLock lock(&mu_);
      --under_way_;
      if (first_.ok()) first_ = status;
    };
    return absl::OkStatus();
  }
  // What `body` does, and then the calls' end. Its own error comes first.
  absl::Status Around(const std::function<void()>& body) {
    absl::Status own;
    try {
      body();
    } catch (const std::exception& error) {
      own = absl::InternalError(error.what());
    }
    auto over = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return under_way_ == 0; };
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithTimeout(absl::Condition(&over), kHang))
      return absl::DeadlineExceededError("a call hangs");
    const absl::Status first = std::exchange(first_, absl::OkStatus());
    return own.ok() ? first : own;
  }

 private:
  absl::Mutex mu_;
  int under_way_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status first_ ABSL_GUARDED_BY(mu_);
};

// Scenario rpc 31. Ours: a few lines of a program's own.
TEST_P(ScenarioFuturesTest, AScopeThatAwaitsWhatWasBegunInIt) {
  auto scope = std::make_shared<AwaitsCalls>();
  W(0).AddInterceptor(scope);
  std::vector<base::Future<Values>> sums;
  EXPECT_TRUE(scope
                  ->Around([&] {
                    for (int i = 0; i < 10; ++i) {
                      sums.push_back(AddAsync(W(0), i % 2 == 0 ? "worker1" : "worker0", at::ones({1}), i));
                    }
                  })
                  .ok());
  for (auto& sum : sums) EXPECT_TRUE(sum.ready());
  auto failing = [&] { sums.push_back(AddAsync(W(0), "worker1", at::ones({10}), at::ones({5}))); };
  EXPECT_THAT(Text(scope->Around(failing)), HasSubstr("The size of tensor a (10)"));
  EXPECT_THAT(Text(scope->Around([&] {
                failing();
                throw std::runtime_error("of the body itself");
              })),
              HasSubstr("of the body itself"));
  EXPECT_TRUE(scope->Around([] {}).ok());
}

}  // namespace
}  // namespace Atoll::rpc
