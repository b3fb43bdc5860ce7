#include "atoll/base/clock.h"

#include <time.h>

#include "absl/time/clock.h"

namespace Atoll::base {
namespace {

int64_t MonotonicNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

RealClock::RealClock() : origin_(absl::Now()), origin_ns_(MonotonicNanos()) {}

absl::Time RealClock::Now() const { return origin_ + absl::Nanoseconds(MonotonicNanos() - origin_ns_); }

}  // namespace Atoll::base
