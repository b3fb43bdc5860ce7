#include "atoll/base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"

namespace Atoll::base {

std::atomic<uint64_t> fork_internal::forks{0};

namespace {

// Asked for once a process: every call that is served makes a mark.
std::atomic<pid_t> known_pid{0};

int Register() {
  known_pid.store(getpid(), std::memory_order_relaxed);
  // Without memory for the registration a child is not recognized: nothing better can be done about it here.
  return pthread_atfork(nullptr, nullptr, [] {
    fork_internal::forks.fetch_add(1, std::memory_order_relaxed);
    known_pid.store(getpid(), std::memory_order_relaxed);
  });
}

}  // namespace

ForkMark::ForkMark() {
  [[maybe_unused]] static const int registered = Register();
  forks_ = fork_internal::forks.load(std::memory_order_relaxed);
  pid_ = known_pid.load(std::memory_order_relaxed);
}

absl::Status ForkMark::Error(absl::string_view what) const {
  return WithRan(
      absl::FailedPreconditionError(absl::StrCat(
          what, " in process ", getpid(), ", which was forked from process ", pid_,
          " after that had made the object: threads and connections stayed there. Make a Session (or "
          "Node, Agent, Endpoint) of its own after the fork, or exec (ran: no)")),
      Ran::kNo);
}

}  // namespace Atoll::base
