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

// Scenario rpc 20.
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

// Scenario rpc 29.
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

TEST(WhenAll, GathersInOrderWhateverTheOrderOfTheEnds) {
  std::vector<Promise<int>> promises(4);
  std::vector<Future<int>> futures;
  for (const Promise<int>& promise : promises) futures.push_back(promise.future());
  const Future<std::vector<int>> all = WhenAll(futures);
  for (int i : {2, 0, 3}) promises[i].Set(i);
  EXPECT_FALSE(all.ready());
  promises[1].Set(1);
  EXPECT_EQ(*all.Wait(absl::ZeroDuration()), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_TRUE(WhenAll(std::vector<Future<int>>()).Wait(absl::ZeroDuration())->empty());
}

// Scenario batch_rpc 10.
TEST(WhenAll, TheFirstErrorEndsItAtOnceAndOnce) {
  std::vector<Promise<int>> promises(3);
  std::vector<Future<int>> futures;
  for (const Promise<int>& promise : promises) futures.push_back(promise.future());
  const Future<std::vector<int>> all = WhenAll(futures);
  int ends = 0;
  all.Then([&](const absl::StatusOr<std::vector<int>>&) { ++ends; });
  promises[1].Set(absl::UnavailableError("one of them"));
  EXPECT_EQ(all.Wait(absl::ZeroDuration()).status(), absl::UnavailableError("one of them"));
  promises[0].Set(0);
  promises[2].Set(absl::UnavailableError("another"));
  EXPECT_EQ(ends, 1);
}

TEST(WhenAll, TellsTheThreadThatTakesThemOfEachValue) {
  struct Bound {
    std::vector<std::thread::id>* told;
    void OnConsumed() const { told->push_back(std::this_thread::get_id()); }
  };
  std::vector<std::thread::id> first, second;
  std::vector<Promise<Bound>> promises(2);
  const Future<std::vector<Bound>> all = WhenAll<Bound>({promises[0].future(), promises[1].future()});
  std::thread([&] {
    promises[1].Set(Bound{&second});
    promises[0].Set(Bound{&first});
  }).join();
  first.clear();
  second.clear();
  ASSERT_TRUE(all.Wait(absl::ZeroDuration()).ok());
  EXPECT_EQ(first, std::vector<std::thread::id>{std::this_thread::get_id()});
  EXPECT_EQ(second, first);
}

TEST(Future, WaitHasALimit) {
  Promise<int> promise;
  EXPECT_EQ(promise.future().Wait(absl::Milliseconds(1)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace Atoll::base
