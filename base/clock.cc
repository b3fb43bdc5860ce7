#include "atoll/base/clock.h"

#include <time.h>

#include <algorithm>

#include "absl/time/clock.h"

namespace Atoll::base {
namespace {

int64_t MonotonicNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

absl::Time Now() {
  static const absl::Time origin = absl::Now();
  static const int64_t origin_ns = MonotonicNanos();
  return origin + absl::Nanoseconds(MonotonicNanos() - origin_ns);
}

bool AwaitFor(absl::Mutex& mu, const absl::Condition& condition, absl::Duration limit) {
  const absl::Time end = Now() + limit;
  while (true) {
    if (mu.AwaitWithTimeout(condition, std::min(end - Now(), kLongestWait))) return true;
    if (Now() >= end) return false;
  }
}

}  // namespace Atoll::base
