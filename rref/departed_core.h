// Who has gone, and why: remembered so that late messages are refused, and not for ever. A member's
// incarnation never comes back.
#pragma once

#include <cstddef>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "atoll/base/ids.h"

namespace Atoll::rref {

/// How many are remembered where nothing else is said.
inline constexpr size_t kMostDeparted = size_t{1} << 16;

/// Not thread-safe: its owner guards it.
class Departed {
 public:
  /// Beyond `limit` the oldest is forgotten.
  explicit Departed(size_t limit) : limit_(limit) {}

  /// False if `member` is there already: the first reason stays.
  bool Add(const base::MemberId& member, absl::Status why) {
    if (!reasons_.emplace(member, std::move(why)).second) return false;
    order_.push_back(member);
    if (order_.size() > limit_) {
      reasons_.erase(order_.front());
      order_.pop_front();
    }
    return true;
  }

  bool Contains(const base::MemberId& member) const { return reasons_.contains(member); }

  /// Why `member` is gone. Null if it is not, or forgotten. Valid until the next Add.
  const absl::Status* Find(const base::MemberId& member) const {
    auto found = reasons_.find(member);
    return found == reasons_.end() ? nullptr : &found->second;
  }

 private:
  const size_t limit_;
  absl::flat_hash_map<base::MemberId, absl::Status> reasons_;
  std::deque<base::MemberId> order_;  // Oldest first.
};

}  // namespace Atoll::rref
