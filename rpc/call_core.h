// The calls between two incarnations, decided without I/O: which are awaited, which have passed their
// deadline, what is a late or repeated answer, and, on the side that answers, which requests may run and
// which are cancelled. Not thread-safe: its owner's mutex guards it.
//
// A caller numbers its calls 1, 2, 3 ... and puts the lowest number that it still awaits in each request.
// Below that nothing is of use to anybody: such requests do not run, and such answers are not sent.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <stop_token>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/time/time.h"
#include "atoll/base/status.h"
#include "atoll/rpc/session_core.h"

namespace Atoll::rpc {

/// A call that waits for its answer. The agent derives what it needs.
struct PendingCall {
  virtual ~PendingCall() = default;

  absl::Time deadline = absl::InfiniteFuture();
  std::weak_ptr<OutMessage> request;  ///< Gone once the other side has it.
  /// The answer is being written into memory of the caller: the call must not end before that does.
  bool landing = false;
  bool one_way = false;  ///< Waits only until the other side has taken it.
  bool torn = false;     ///< Such a write began and has not ended well.
  bool expired = false;  ///< Its deadline passed while it was landing.
  uint64_t id = 0;       ///< The core's.
};

/// The calls that we made.
class CallTable {
 public:
  /// Takes `call` and numbers it.
  uint64_t Add(std::unique_ptr<PendingCall> call);
  /// The lowest number that is awaited, or the next one.
  uint64_t watermark() const { return calls_.empty() ? next_ : calls_.begin()->first; }
  /// Null if it is not awaited (late, repeated, never made).
  PendingCall* Find(uint64_t id);
  /// Takes it out: its completion, once.
  std::unique_ptr<PendingCall> Take(uint64_t id);
  struct Expired {
    std::vector<std::unique_ptr<PendingCall>> calls;
    bool landing = false;  ///< Some are landing: they are marked, and the transfer is to be cut.
  };
  Expired TakeExpired(absl::Time now);
  /// All, at the end of the session, but those that land.
  std::vector<std::unique_ptr<PendingCall>> TakeAll();
  absl::Time NextDeadline() const;
  size_t size() const { return calls_.size(); }
  /// One-way calls that are not known to be taken.
  size_t one_way_count() const { return one_way_; }
  void CheckInvariants() const;

 private:
  absl::btree_map<uint64_t, std::unique_ptr<PendingCall>> calls_;
  absl::btree_set<std::pair<absl::Time, uint64_t>> deadlines_;  // Of those not expired.
  uint64_t next_ = 1;
  size_t one_way_ = 0;
};

/// DeadlineExceeded, of a call whose time is up.
absl::Status NoAnswerWithin(absl::Duration timeout);

/// Whether an unanswered call may have run, when its session ends or its deadline passes.
base::Ran RanUnanswered(const PendingCall& call);

/// The calls that the other side made and that are not answered yet.
class ServedTable {
 public:
  explicit ServedTable(size_t limit) : limit_(limit) {}

  enum class Admission {
    kRun,
    kUnwanted,  ///< The caller gave it up, or made it before: not run, not answered.
    kFull,      ///< Too many are unanswered: refused (ran: no).
  };
  struct Admitted {
    Admission admission;
    std::stop_token stop;  ///< Of kRun.
    std::vector<std::stop_source> given_up;
  };
  /// Like all below it returns those whose caller has given them up: to be asked to stop, without a lock.
  Admitted Admit(uint64_t call, uint64_t watermark);
  /// Takes it out. False if nobody waits for the answer any more.
  bool Answer(uint64_t call);
  /// The caller gave it up. That may come before the call, by the other lane: it then does not run.
  std::vector<std::stop_source> Cancel(uint64_t call);
  std::vector<std::stop_source> CancelAll();
  size_t size() const { return calls_.size(); }

 private:
  const size_t limit_;
  absl::btree_map<uint64_t, std::stop_source> calls_;
  // Given up and not admitted yet, or long answered: the watermark tells, in time. The newest.
  absl::btree_set<uint64_t> given_up_;
  uint64_t watermark_ = 0;
};

}  // namespace Atoll::rpc
