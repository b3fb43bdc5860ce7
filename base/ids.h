// Ids are distinct types: two swapped integers compile, and a wrong owner is a wrong model.
#pragma once

#include <compare>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace Atoll::base {

/// A value of type T that mixes with no other id. Tag is only a name.
template <class Tag, class T>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(T value) : value_(value) {}
  constexpr T value() const { return value_; }

  friend constexpr auto operator<=>(StrongId, StrongId) = default;
  template <class H>
  friend H AbslHashValue(H state, StrongId id) {
    return H::combine(std::move(state), id.value_);
  }
  friend std::ostream& operator<<(std::ostream& out, StrongId id) { return out << id.value_; }

 private:
  T value_{};
};

/// Position of a member in its job: 0 .. world size - 1. Dense among owners and workers together.
using Rank = StrongId<struct RankTag, int32_t>;
/// One life of a process under a name. Drawn at random at start; never 0 for a real process.
using Incarnation = StrongId<struct IncarnationTag, uint64_t>;
/// Number of a message in one direction of a session: 1, 2, 3 ...
using MessageNumber = StrongId<struct MessageNumberTag, uint64_t>;
/// Number of a call within the incarnation of its caller: 1, 2, 3 ...
using CallId = StrongId<struct CallIdTag, uint64_t>;
/// Number of an optimizer step of the job: 1, 2, 3 ...
using Step = StrongId<struct StepTag, int64_t>;

/// An id that is unique in the job: the incarnation that made it, and its counter there.
template <class Tag>
struct UniqueId {
  Incarnation creator;
  uint64_t counter = 0;

  friend auto operator<=>(const UniqueId&, const UniqueId&) = default;
  template <class H>
  friend H AbslHashValue(H state, const UniqueId& id) {
    return H::combine(std::move(state), id.creator, id.counter);
  }
  std::string ToString() const { return absl::StrCat(absl::Hex(creator.value()), "/", counter); }
};

/// A remote object (`rref`).
using ObjectId = UniqueId<struct ObjectIdTag>;
/// One reference to a remote object held by one process (`rref`).
using ForkId = UniqueId<struct ForkIdTag>;

/// A process of the job: its name, and which life of that name it is.
struct MemberId {
  std::string name;
  Incarnation incarnation;

  friend auto operator<=>(const MemberId&, const MemberId&) = default;
  template <class H>
  friend H AbslHashValue(H state, const MemberId& id) {
    return H::combine(std::move(state), id.name, id.incarnation);
  }
  /// "worker1#3f2a": for logs and errors.
  std::string ToString() const {
    return absl::StrCat(name, "#", absl::Hex(incarnation.value() & 0xffff, absl::kZeroPad4));
  }
};

/// A fresh incarnation from the operating system's random source.
Incarnation NewIncarnation();

}  // namespace Atoll::base
