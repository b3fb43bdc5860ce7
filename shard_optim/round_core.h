// Decides when a chunk is applied, from whose contributions, and who is answered when. Pure: an event and the
// time go in, actions come out, to be carried out in order; no I/O, no clock, no tensors. One core is one
// shard's; it is confined to whatever guards the shard.
//
// Sync. A step is a round. Its roster is fixed at its first contribution: the members that joined from this
// step or earlier and did not leave before. A chunk is applied when none of its living roster is missing,
// with whatever was contributed (a dead worker's contribution stands); contributions are folded in rank
// order, so those behind a missing rank are parked. Two rounds may be open at once: the current one (the
// lowest not complete on all chunks) and the next; a chunk takes its steps strictly in order.
//
//   (worker, step, chunk):  missing ─Contribute─> parked ─all lower ranks in─> folded ─none missing─> applied
//                                                                 reply: applied AND the landing is open
//
// Async. Every contribution is folded and applied at once. A worker counts its own steps.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "atoll/base/ids.h"

namespace Atoll::shard_optim {

struct RoundOptions {
  bool sync = true;
  int worker_count = 1;  ///< Workers 0 .. worker_count - 1 are joined from step 1, once all have attached.
  int chunks = 0;        ///< Numbered from 0.
  int first_chunk = 0;   ///< Added to their numbers in texts.
  absl::Duration round_limit = absl::Seconds(60);
  int64_t max_parked = 1 << 20;  ///< Contributions parked at one time; the lowest missing rank is exempt.
};

struct Action {
  enum class Kind {
    kAttached,  ///< Answer `worker`'s attach.
    kFold,     ///< Add worker's contribution (step, chunk) to the chunk's sum: ranks come in ascending order.
    kApply,    ///< Apply the sum of (step, chunk); the mean is over `contributors`.
    kSkip,     ///< (step, chunk) ends without a contribution: values stay, and are those of `step`.
    kReply,    ///< Answer worker's push of (step, chunk), applied with `contributors`.
    kRefuse,   ///< Answer worker's push of (step, chunk) with `status`.
    kDiscard,  ///< Forget what was contributed to (step, chunk), folded or not.
    kDrop,     ///< `worker` is gone: forget whom to answer.
  };
  Kind kind;
  int worker = -1;
  int chunk = -1;
  int64_t step = 0;
  int contributors = 0;
  absl::Status status;
};

/// What became of a contribution. Carry out `actions`; of a refused one there are none.
struct Verdict {
  enum class Kind {
    kTaken,     ///< Keep it.
    kRepeated,  ///< It was taken before: forget this copy, answer this call instead of the earlier one.
    kRefused,   ///< Forget it and answer with `status` at once.
  };
  Kind kind = Kind::kRefused;
  bool disagrees = false;  ///< Refused because of its hyper-parameters.
  absl::Status status;
  std::vector<Action> actions;
};

class RoundCore {
 public:
  explicit RoundCore(RoundOptions options);

  /// Registers `member` as `worker`. The same name with another incarnation replaces (the old one is gone); of
  /// the same one it closes the landing, which the step under way has to open again.
  /// kAttached comes for everyone once all of worker_count are there, later at once.
  /// AlreadyExists: another living member has this index, or this member another index.
  absl::Status Attach(int worker, const base::MemberId& member, std::vector<Action>* actions);
  /// -1 if `member` is not (or no longer) attached.
  int WorkerOf(const base::MemberId& member) const;
  /// Workers below worker_count that have not attached yet; empty once all had.
  std::vector<int> NotYetAttached() const;
  /// In the roster, without an end.
  bool IsJoined(int worker) const;
  /// The smallest step from which `worker` could join now.
  int64_t NextStep(int worker) const;

  /// True: in the roster from from_step on, dropped from open rounds before. Requires: attached.
  bool Join(int worker, int64_t from_step, std::vector<Action>* actions);
  /// Requires: attached.
  void Leave(int worker, int64_t after_step, std::vector<Action>* actions);
  void Gone(const base::MemberId& member, std::vector<Action>* actions);
  /// Requires: attached.
  void OpenLanding(int worker, int64_t step, std::vector<Action>* actions);
  /// `hyper` stands for the hyper-parameters (equal exactly if they are). Requires: attached, a valid chunk.
  Verdict Contribute(int worker, int64_t step, int chunk, uint64_t hyper, absl::Time now);
  /// Fails the current round if its limit has passed: its unapplied chunks forget what they got, and the
  /// round is open again.
  void Tick(absl::Time now, std::vector<Action>* actions);
  /// InfiniteFuture if no round is open.
  absl::Time NextDeadline() const;

  /// Whether a contribution of `worker` would be folded at once: it is then taken however much is parked.
  bool IsNextInOrder(int worker, int64_t step, int chunk) const;
  int64_t parked() const { return parked_; }
  /// Sync: rounds complete. Async: steps of all workers together, of which something was applied.
  int64_t steps() const { return options_.sync ? current_ - 1 : begun_count_; }
  int members() const { return static_cast<int>(workers_.size()); }

  /// OK, or Internal with the first rule that does not hold. For tests.
  absl::Status CheckInvariants() const;

 private:
  struct Member {
    base::MemberId id;
    bool joined = false;
    int64_t from = 0;          // First step it contributes to.
    int64_t last = INT64_MAX;  // Last step.
    int64_t landing = 0;       // Its landing is open up to this step.
  };
  struct Part {              // Of a chunk in a round.
    std::map<int, bool> in;  // Contributors; true: folded.
  };
  struct Round {
    int64_t step = 0;
    bool begun = false;
    bool touched = false;    // A chunk was applied or skipped in it: nobody joins any more.
    std::set<int> expected;  // The living part of the roster.
    uint64_t hyper = 0;
    int hyper_from = -1;
    absl::Time deadline = absl::InfiniteFuture();
    std::vector<Part> parts;  // By chunk.
    int done = 0;             // Chunks applied or skipped.
  };
  struct ChunkState {
    int64_t applied = 0;                 // Sync: the last step applied (or skipped).
    std::set<int> contributors;          // Of that step.
    std::map<int, int64_t> last_pushed;  // Async: by worker.
  };
  struct Pending {  // A push to be answered.
    int64_t step = 0;
    bool applied = false;
    int contributors = 0;
  };

  Round NewRound(int64_t step) const;
  Round* FindRound(int64_t step);
  const Round* FindRound(int64_t step) const;
  static int FirstMissing(const Round& round, int chunk);
  void Begin(Round& round, uint64_t hyper, int worker, absl::Time now);
  Verdict ContributeSync(int worker, int64_t step, int chunk, uint64_t hyper, absl::Time now);
  Verdict ContributeAsync(int worker, int64_t step, int chunk);
  Verdict RefusePast(int worker, int64_t step, int chunk) const;
  void AwaitReply(int worker, int chunk, Pending pending, std::vector<Action>* actions);
  void DropFromRounds(int worker, int64_t from_step, int64_t before_step, std::vector<Action>* actions);
  int64_t FirstAttended() const;
  void SkipDeserted(std::vector<Action>* actions);
  void Advance(int chunk, std::vector<Action>* actions);
  void Complete(Round& round, int chunk, std::vector<Action>* actions);
  void PopCompleteRounds();

  const RoundOptions options_;
  bool assembled_ = false;
  std::map<int, Member> workers_;  // Attached and alive.
  int64_t current_ = 1;
  std::deque<Round> rounds_;  // Sync: the current one and the next.
  std::vector<ChunkState> chunks_;
  std::vector<std::map<int, Pending>> pending_;  // By chunk, worker.
  std::map<int, int64_t> pushed_;                // Async: highest step by worker, kept over restarts.
  int64_t parked_ = 0;
  int64_t begun_count_ = 0;  // Async.
};

}  // namespace Atoll::shard_optim
