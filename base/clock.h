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

/// A clock that never jumps (CLOCK_MONOTONIC, its origin placed at the wall time of first use), so
/// that a change of the system's date ends no lease and fires no deadline.
class RealClock : public Clock {
 public:
  RealClock();
  absl::Time Now() const override;

 private:
  absl::Time origin_;
  int64_t origin_ns_;
};

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
