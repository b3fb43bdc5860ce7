// After fork. A child has the memory of its parent and none of its threads, and some mutex may be held there for
// good. So an object that has threads or connections marks where it was made; each public function looks at the
// mark before it takes a lock or touches a socket, and a destructor leaves everything alone. The parent's
// connections get no byte from a child, and the parent goes on.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace Atoll::base {

namespace fork_internal {
/// How many forks lie between the first process and this one. Of the process by nature.
extern std::atomic<uint64_t> forks;
}  // namespace fork_internal

/// The process that made an object. Thread-safe.
class ForkMark {
 public:
  ForkMark();
  ForkMark(const ForkMark&) = default;
  ForkMark& operator=(const ForkMark&) = default;

  /// Whether this process is a child (or a child's child) of the one that made the mark. One relaxed load. Sees
  /// fork(), but not clone() or vfork(), after which a child may only exec.
  bool in_child() const { return forks_ != fork_internal::forks.load(std::memory_order_relaxed); }

  /// FailedPrecondition (ran: no) in a child: says that `what` was used there, and what is right. Else OK.
  absl::Status Check(absl::string_view what) const { return in_child() ? Error(what) : absl::OkStatus(); }
  absl::Status Error(absl::string_view what) const;

 private:
  uint64_t forks_;
  pid_t pid_;
};

/// Takes what a child must not destroy: its destructor never runs.
template <class T>
void Abandon(T&& value) {
  static_assert(!std::is_lvalue_reference_v<T>, "moved, so that nobody else destroys it");
  new std::decay_t<T>(std::forward<T>(value));
}

}  // namespace Atoll::base
