// Gathers and barriers: pure decisions, no I/O, no clock of its own. A part of MembershipCore.
//
// A gather is known by its name and its participants, and each use of it is a generation of its own: a
// member's n-th call meets the others' n-th. So what one generation comes to, everybody in it is told: one
// that fails (a participant died or left or is gone from the start, or a deadline passed) is kept until those
// who have not come yet have fetched the failure, else their call would meet the others' next one.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "atoll/cluster/member.h"

namespace Atoll::cluster {

/// Not thread-safe.
class GatherCore {
 public:
  using Token = uint64_t;  ///< Names a call that waits for its answer.
  /// In order of rank.
  using Values = std::shared_ptr<const std::vector<std::string>>;
  struct Answer {
    Token token = 0;
    absl::Status status;
    Values values;  ///< Null with an error.
  };
  using Answers = std::vector<Answer>;

  struct Limits {
    size_t name_bytes = 256;
    size_t value_bytes = 1 << 20;
    size_t participants = 1024;      ///< Names of them, in an open world; in another one, its size.
    size_t gathers = 4096;           ///< In all; for a new one the oldest failure is forgotten.
    size_t failed_of_one_name = 16;  ///< Beyond it the oldest failure is forgotten.
  };

  /// Who is there, as MembershipCore knows it.
  class Roster {
   public:
    virtual ~Roster() = default;
    virtual int world_size() const = 0;  ///< Or kOpenWorld.
    virtual std::vector<base::Rank> LiveRanks() const = 0;
    virtual const Member* Live(base::Rank rank) const = 0;
    virtual const Member* Live(absl::string_view name) const = 0;
    /// Why the last holder of this rank or name is gone; nullopt if there never was one, or one lives.
    virtual std::optional<std::string> WhyGone(base::Rank rank) const = 0;
    virtual std::optional<std::string> WhyGone(absl::string_view name) const = 0;
  };

  /// `roster` outlives this.
  explicit GatherCore(const Roster* roster) : GatherCore(roster, Limits()) {}
  GatherCore(const Roster* roster, Limits limits) : roster_(roster), limits_(limits) {}

  /// `from`, a live member, comes with `value`. `participants` are names; none: every rank of the world but
  /// those whose member is gone when the first comes, or, of an open world, those who are there then. (Who joins
  /// such a world later meets the others' next one.)
  Answers Contribute(const Member& from, std::string name, std::vector<std::string> participants,
                     std::string value, absl::Time deadline, Token token);
  /// `member` died or left; what it contributed before stands. The roster no longer has it.
  Answers MemberGone(const Member& member, const std::string& why);
  Answers Tick(absl::Time now);
  absl::Time NextDeadline() const;

  size_t size() const { return size_; }
  /// Empty, or the first invariant that does not hold. For tests and debug builds.
  std::string BrokenInvariant() const;

 private:
  struct Seat {
    base::Rank rank{-1};  ///< Negative: known by name only, it has not come.
    std::string name;     ///< Empty: known by rank only.
    bool arrived = false;
    Token token = 0;
    std::string value;
  };
  struct Gather {
    std::vector<Seat> seats;
    absl::Time deadline = absl::InfiniteFuture();  ///< Of the caller who waits least.
    absl::Status failure;                          ///< OK: open.
    uint64_t order = 0;                            ///< Grows with each that begins.
  };
  using Key = std::pair<std::string, std::vector<std::string>>;
  using Generations = std::list<Gather>;

  absl::Status Create(const Key& key, const Member& from, Gather& gather) const;
  std::string WhoIsGone(const Key& key) const;
  bool ForgetOldestFailure();
  Answers Complete(Gather& gather) const;
  Answers Fail(Gather& gather, absl::Status failure);
  void Prune();
  std::string Missing(const Gather& gather) const;
  static bool Sits(const Key& key, const Seat& seat, const Member& member);

  const Roster* const roster_;
  const Limits limits_;
  std::map<Key, Generations> gathers_;
  size_t size_ = 0;
  uint64_t begun_ = 0;
};

}  // namespace Atoll::cluster
