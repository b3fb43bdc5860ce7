#include "atoll/base/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "atoll/base/future.h"

namespace Atoll::base {
namespace {

constexpr absl::Duration kHang = absl::Seconds(30);

TEST(ThreadPool, RunsEverythingBeforeItEnds) {
  std::atomic<int> ran = 0;
  {
    ThreadPool pool({.threads = 3});
    for (int i = 0; i < 1000; ++i) pool.Schedule([&] { ++ran; });
  }
  EXPECT_EQ(ran, 1000);
}

TEST(ThreadPool, AWaitInsideAWaitCountsOnce) {
  // Before the pool, whose tasks look at them until its end: so in all tests here.
  std::atomic<int> at_once = 0, most = 0;
  Promise<int> both;
  ThreadPool pool({.threads = 1, .max_threads = 4});
  auto busy = [&] {
    most = std::max(most.load(), ++at_once);
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    --at_once;
  };
  pool.Schedule([&] {
    ThreadPool::BlockingScope outer, inner;
    Promise<int> last;
    pool.Schedule(busy);
    pool.Schedule(busy);
    pool.Schedule([last] { last.Set(0); });
    both.Set(last.future().Wait(kHang));
  });
  absl::StatusOr<int> done = both.future().Wait(kHang);
  ASSERT_TRUE(done.ok()) << done.status();
  ASSERT_TRUE(pool.Drain(kHang));
  EXPECT_EQ(most, 1) << "more tasks at once than the pool has threads";
}

/// Says when the thread that made it ends.
struct AtThreadEnd {
  ~AtThreadEnd() { ended->Notify(); }
  absl::Notification* ended;
};

TEST(ThreadPool, AThreadThatEndedIsNoSpare) {
  absl::Notification spare_ended, begun;
  absl::StatusOr<int> inner = absl::UnknownError("not run");
  auto owned = std::make_unique<ThreadPool>(ThreadPool::Options{.threads = 1});
  ThreadPool* const pool = owned.get();
  pool->Schedule([&, pool] {
    Promise<int> first, second;
    pool->Schedule([&, first] {
      static thread_local AtThreadEnd at_end{&spare_ended};
      first.Set(1);
    });
    if (!first.future().Wait(kHang).ok()) return;
    begun.Notify();
    spare_ended.WaitForNotification();  // The pool is being destroyed: its only idle thread is gone.
    pool->Schedule([second] { second.Set(2); });
    inner = second.future().Wait(kHang);
  });
  begun.WaitForNotification();
  owned.reset();
  ASSERT_TRUE(inner.ok()) << inner.status();
  EXPECT_EQ(*inner, 2);
}

TEST(ThreadPool, NestedWaitsWithOneThreadDoNotDeadlock) {
  std::vector<Promise<int>> promises(51);
  ThreadPool pool({.threads = 1});
  // Each task waits for the next one: depth 50 on a pool of one thread.
  promises[50].Set(0);
  for (int i = 0; i < 50; ++i) {
    pool.Schedule([&, i] {
      absl::StatusOr<int> inner = promises[i + 1].future().Wait(kHang);
      promises[i].Set(inner.ok() ? absl::StatusOr<int>(*inner + 1) : inner);
    });
  }
  absl::StatusOr<int> result = promises[0].future().Wait(kHang);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(*result, 50);
}

TEST(ThreadPool, AtItsLimitAWaitIsRefusedNotADeadlock) {
  Promise<Unit> never;
  Promise<absl::StatusCode> refused;
  ThreadPool pool({.threads = 1, .max_threads = 3});
  for (int i = 0; i < 3; ++i) {
    pool.Schedule([&] {
      absl::StatusOr<Unit> result = never.future().Wait(kHang);
      if (!result.ok()) refused.Set(result.status().code());
    });
  }
  absl::StatusOr<absl::StatusCode> code = refused.future().Wait(kHang);
  ASSERT_TRUE(code.ok());
  EXPECT_EQ(*code, absl::StatusCode::kResourceExhausted);
  never.Set(Unit{});
}

// Which threads ran the tasks of a pool, and how many tasks ran at one time at most.
struct Seen {
  absl::Mutex mu;
  std::set<std::thread::id> threads;
  int now = 0;
  int most = 0;
  void Enter() {
    absl::MutexLock lock(&mu);
    threads.insert(std::this_thread::get_id());
    most = std::max(most, ++now);
  }
  void Exit() {
    absl::MutexLock lock(&mu);
    --now;
  }
};

TEST(ThreadPool, ThreadsThatReplaceWaitingOnesAreKeptAndUsedAgain) {
  Seen seen;
  ThreadPool pool({.threads = 1});
  for (int i = 0; i < 200; ++i) {
    Promise<Unit> inner, outer;
    pool.Schedule([&seen, &pool, inner, outer] {
      seen.Enter();
      pool.Schedule([&seen, inner] {
        seen.Enter();
        seen.Exit();
        inner.Set(Unit{});
      });
      EXPECT_TRUE(inner.future().Wait(kHang).ok());
      seen.Exit();
      outer.Set(Unit{});
    });
    ASSERT_TRUE(outer.future().Wait(kHang).ok());
  }
  // The waiting one, the one in its place, and one more where a thread was still between two tasks.
  EXPECT_LE(seen.threads.size(), 3u);
}

TEST(ThreadPool, RunsNoMoreTasksAtOneTimeThanItsThreads) {
  Seen seen;
  {
    std::vector<Promise<Unit>> gates(6);
    Promise<Unit> reached;
    ThreadPool pool({.threads = 2});
    // First some waits, so that spare threads exist.
    for (auto& gate : gates) pool.Schedule([gate] { EXPECT_TRUE(gate.future().Wait(kHang).ok()); });
    pool.Schedule([&] { reached.Set(Unit{}); });
    ASSERT_TRUE(reached.future().Wait(kHang).ok());
    for (auto& gate : gates) gate.Set(Unit{});
    for (int i = 0; i < 1000; ++i) {
      pool.Schedule([&] {
        seen.Enter();
        std::this_thread::yield();
        seen.Exit();
      });
    }
  }
  // A thread that comes back from a wait may run beside them, but the counted tasks never wait.
  EXPECT_LE(seen.most, 2);
}

TEST(SerialExecutor, LetsOthersHaveATurn) {
  Promise<Unit> other;
  {
    std::atomic<bool> stop = false;
    std::shared_ptr<SerialExecutor> serial;
    std::function<void()> again;
    ThreadPool pool({.threads = 1});
    serial = SerialExecutor::Create(&pool);
    // A serial queue that never runs empty until a task outside of it has run.
    again = [&] {
      if (!stop) serial->Schedule(again);
    };
    serial->Schedule(again);
    pool.Schedule([&] {
      stop = true;
      other.Set(Unit{});
    });
    EXPECT_TRUE(other.future().Wait(kHang).ok());
    stop = true;
  }
}

TEST(SerialExecutor, KeepsOrderAndNeverOverlaps) {
  std::vector<int> order;  // Unguarded on purpose: the sanitizers see an overlap.
  {
    ThreadPool pool({.threads = 4});
    auto serial = SerialExecutor::Create(&pool);
    for (int i = 0; i < 500; ++i) serial->Schedule([&order, i] { order.push_back(i); });
  }
  ASSERT_EQ(order.size(), 500u);
  for (int i = 0; i < 500; ++i) EXPECT_EQ(order[i], i);
}

TEST(Timer, RunsInOrderOfTimeAndCancels) {
  RealClock clock;
  std::vector<int> order;
  absl::Notification done;
  Timer timer(&clock);
  absl::Time now = clock.Now();
  Timer::Id cancelled = timer.At(now + absl::Seconds(3600), [&] { order.push_back(9); });
  timer.At(now + absl::Milliseconds(2), [&] {
    order.push_back(2);
    done.Notify();
  });
  timer.At(now + absl::Milliseconds(1), [&] { order.push_back(1); });
  EXPECT_TRUE(timer.Cancel(cancelled));
  EXPECT_FALSE(timer.Cancel(cancelled));
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kHang));
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

}  // namespace
}  // namespace Atoll::base
