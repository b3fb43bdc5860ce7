// Who holds which object of this rank: the pure core of an ObjectSpace, owner's side. Events in, what to do
// out; no I/O, no clock, no lock (its owner guards it).
//
// An object is alive while a fork (one reference, held by one member) or a name holds it. Every event may be
// repeated, and a fork's events may come in any order:
//   a release before its creation leaves a mark, and the creation then gives nothing (its caller had given
//   up); a member's death releases all its forks, and its later events are refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/base/ids.h"
#include "atoll/rref/departed_core.h"

namespace Atoll::rref {

class ForkCore {
 public:
  struct Limits {
    size_t objects = size_t{1} << 20;
    size_t forks_per_member = size_t{1} << 20;  ///< Held, asked for and marked as released early.
    size_t departed_members = kMostDeparted;    ///< Remembered, so that their late messages are refused.
  };
  /// Object ids are made from `self`.
  explicit ForkCore(base::Incarnation self) : ForkCore(self, Limits{}) {}
  ForkCore(base::Incarnation self, Limits limits)
      : self_(self), limits_(limits), departed_(limits.departed_members) {}

  /// What a creation leads to.
  struct Begin {
    enum class Kind {
      kMake,  ///< Make the object `id` now, then call Finish.
      kHave,  ///< `id` is there (pinned under the name), and the fork holds it.
      kWait,  ///< Another creation of the name is under way; Finish will name this fork.
    };
    Kind kind = Kind::kMake;
    base::ObjectId id;
  };
  /// Someone asks for a new object, held by `fork`; `name` empty: without a name. Errors: Unavailable (the
  /// holder is gone), Cancelled (the fork was released before), AlreadyExists (the fork is in use),
  /// ResourceExhausted.
  absl::StatusOr<Begin> BeginCreate(const base::ForkId& fork, const base::MemberId& holder,
                                    absl::string_view name);

  /// What the end of a creation leads to.
  struct Finished {
    std::vector<base::ForkId> holders;    ///< Waited for it (the maker's too), and hold it now.
    std::vector<base::ForkId> abandoned;  ///< Waited, but were released or their member died.
    bool drop = false;                    ///< Nobody holds it: destroy it.
  };
  /// The object was made (or not: then all who waited get the maker's error, as `abandoned`, and the name is
  /// free again). Requires: `id` came from a kMake that is not finished.
  Finished FinishCreate(const base::ObjectId& id, bool made);

  /// A new reference to the object pinned under `name`, held by `fork`. A repeat gives the same answer. kWait
  /// while it is being made. Errors as of BeginCreate, and NotFound.
  absl::StatusOr<Begin> Find(const base::ForkId& fork, const base::MemberId& holder, absl::string_view name);

  /// `fork` is given up by `holder`. Returns the object that nobody holds any more, if so: destroy it.
  /// PermissionDenied if another member holds it.
  absl::StatusOr<std::vector<base::ObjectId>> Release(const base::ForkId& fork, const base::MemberId& holder);

  /// A member is gone for good. Returns the objects to destroy.
  std::vector<base::ObjectId> PeerGone(const base::MemberId& member);

  /// The name no longer holds its object. NotFound.
  absl::StatusOr<std::vector<base::ObjectId>> Unpin(absl::string_view name);

  /// Whether `id` is made and held.
  bool Alive(const base::ObjectId& id) const;

  struct Entry {
    base::ObjectId id;
    std::string name;
    std::vector<base::MemberId> holders;  ///< Sorted; a member that holds it twice stands there twice.
  };
  /// Every object that is made, by id.
  std::vector<Entry> List() const;

  /// Aborts if the tables do not agree with each other.
  void CheckInvariants() const;

 private:
  enum class ForkState {
    kWaiting,   // Asked for; its object is being made.
    kHolding,   // Holds its object.
    kReleased,  // Given up early: before its creation came, or while its object was being made.
  };
  struct Fork {
    base::MemberId holder;
    ForkState state = ForkState::kHolding;
    base::ObjectId object;  // Unset for an early release.
  };
  struct Object {
    std::string name;                         // Pinned under it if not empty.
    bool made = false;                        // False while its factory runs.
    absl::flat_hash_set<base::ForkId> forks;  // Waiting (made is false) or holding.
  };

  absl::StatusOr<Begin> Repeated(const base::ForkId& fork, const base::MemberId& holder,
                                 absl::string_view name) const;
  absl::Status Admit(const base::MemberId& holder) const;
  void AddFork(const base::ForkId& fork, const base::MemberId& holder, ForkState state,
               base::ObjectId object);
  void EraseFork(const base::ForkId& fork);
  // Erases the object if nothing holds it; returns whether.
  bool DropIfFree(const base::ObjectId& id);

  const base::Incarnation self_;
  const Limits limits_;
  uint64_t next_object_ = 1;
  absl::flat_hash_map<base::ObjectId, Object> objects_;
  absl::flat_hash_map<std::string, base::ObjectId> names_;
  absl::flat_hash_map<base::ForkId, Fork> forks_;
  absl::flat_hash_map<base::MemberId, absl::flat_hash_set<base::ForkId>> by_member_;
  Departed departed_;
};

}  // namespace Atoll::rref
