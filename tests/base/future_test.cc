#include "atoll/base/future.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>

namespace Atoll::base {
namespace {

TEST(Future, FirstCompletionWins) {
  Promise<int> promise;
  int seen = 0;
  promise.future().Then([&](const absl::StatusOr<int>& result) { seen = *result; });
  EXPECT_FALSE(promise.future().ready());
  EXPECT_TRUE(promise.Set(1));
  EXPECT_FALSE(promise.Set(absl::CancelledError("late")));
  EXPECT_EQ(seen, 1);
  EXPECT_EQ(*promise.future().Wait(absl::ZeroDuration()), 1);
}

TEST(Future, ManyRacingCompletionsCompleteOnce) {
  for (int round = 0; round < 1000; ++round) {
    Promise<int> promise;
    std::atomic<int> callbacks = 0, winners = 0;
    promise.future().Then([&](const absl::StatusOr<int>&) { ++callbacks; });
    std::thread other([&] { winners += promise.Set(1); });
    winners += promise.Set(absl::CancelledError("x"));
    other.join();
    ASSERT_EQ(callbacks, 1);
    ASSERT_EQ(winners, 1);
  }
}

TEST(Future, ACallbackThatThrowsHoldsUpNoOther) {
  Promise<int> promise;
  int ran = 0;
  promise.future().Then([](const absl::StatusOr<int>&) { throw std::runtime_error("the first"); });
  promise.future().Then([&](const absl::StatusOr<int>&) { ++ran; });
  promise.future().Then([](const absl::StatusOr<int>&) { throw std::runtime_error("the second"); });
  promise.future().Then([&](const absl::StatusOr<int>&) { ++ran; });
  std::string thrown;
  try {
    promise.Set(1);
  } catch (const std::runtime_error& error) {
    thrown = error.what();
  }
  EXPECT_EQ(thrown, "the first");
  EXPECT_EQ(ran, 2);
}

TEST(Future, WaitHasALimit) {
  Promise<int> promise;
  EXPECT_EQ(promise.future().Wait(absl::Milliseconds(1)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace Atoll::base
