// Time as a dependency, so that deadline logic is tested without waiting.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace Atoll::base {

/// Tells the time. Thread-safe. Outlives whatever was given it.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() const = 0;
};

/// The time of a clock that never jumps (CLOCK_MONOTONIC, its origin placed at the wall time of the process's
/// first use), so that a change of the system's date ends no lease and fires no deadline. Every deadline is of
/// this clock; absl::Now() is the same until the date changes.
absl::Time Now();

/// Now(), where a Clock is asked for.
class RealClock : public Clock {
 public:
  absl::Time Now() const override { return base::Now(); }
};

/// Waits on `mu`, which the caller holds, as its AwaitWithTimeout does, but on Now(): Abseil's waits end by the
/// system's date, early or late if that changes. How long one of them may be, at the most:
inline constexpr absl::Duration kLongestWait = absl::Milliseconds(500);
bool AwaitFor(absl::Mutex& mu, const absl::Condition& condition, absl::Duration limit)
    ABSL_SHARED_LOCKS_REQUIRED(mu);

/// Moves when told. For tests of cores.
class FakeClock : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::UnixEpoch()) : now_(start) {}
  absl::Time Now() const override {
    absl::MutexLock lock(&mu_);
    return now_;
  }
  void Advance(absl::Duration by) {
    absl::MutexLock lock(&mu_);
    now_ += by;
  }

 private:
  mutable absl::Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::base
