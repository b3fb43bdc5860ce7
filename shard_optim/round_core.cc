#include "atoll/shard_optim/round_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace Atoll::shard_optim {
namespace {

using Kind = Action::Kind;

Verdict Refused(absl::Status status) { return {Verdict::Kind::kRefused, false, std::move(status), {}}; }

Action Of(Kind kind, int worker, int chunk, int64_t step, int contributors = 0) {
  return {kind, worker, chunk, step, contributors, absl::OkStatus()};
}

}  // namespace

RoundCore::RoundCore(RoundOptions options) : options_(options) {
  chunks_.resize(options_.chunks);
  pending_.resize(options_.chunks);
  if (options_.sync) rounds_ = {NewRound(1), NewRound(2)};
}

RoundCore::Round RoundCore::NewRound(int64_t step) const {
  Round round;
  round.step = step;
  round.parts.resize(options_.chunks);
  return round;
}

const RoundCore::Round* RoundCore::FindRound(int64_t step) const {
  for (const Round& round : rounds_) {
    if (round.step == step) return &round;
  }
  return nullptr;
}
RoundCore::Round* RoundCore::FindRound(int64_t step) {
  return const_cast<Round*>(static_cast<const RoundCore*>(this)->FindRound(step));
}

// The lowest rank that `chunk` still waits for; INT_MAX if none.
int RoundCore::FirstMissing(const Round& round, int chunk) {
  for (int worker : round.expected) {
    if (round.parts[chunk].in.count(worker) == 0) return worker;
  }
  return INT32_MAX;
}

// ---- Members --------------------------------------------------------------------------------------------

absl::Status RoundCore::Attach(int worker, const base::MemberId& member, std::vector<Action>* actions) {
  for (const auto& [other, entry] : workers_) {
    if (other != worker && entry.id == member) {
      return absl::AlreadyExistsError(absl::StrCat(member.ToString(), " is worker ", other,
                                                   " already; it cannot be worker ", worker, " too"));
    }
  }
  auto found = workers_.find(worker);
  if (found != workers_.end() && found->second.id != member) {
    if (found->second.id.name != member.name) {
      return absl::AlreadyExistsError(absl::StrCat("worker ", worker, " is ", found->second.id.ToString(),
                                                   ", which is alive; ", member.ToString(),
                                                   " needs an index of its own"));
    }
    Gone(base::MemberId(found->second.id), actions);
    found = workers_.end();
  }
  Member& entry = workers_[worker];
  entry.id = member;
  entry.landing = 0;  // It may make a step again whose landing was open: its second backward has not ended.
  if (assembled_) {
    actions->push_back(Of(Kind::kAttached, worker, -1, 0));
    return absl::OkStatus();
  }
  if (!NotYetAttached().empty()) return absl::OkStatus();
  assembled_ = true;
  for (auto& [index, attached] : workers_) {
    attached.joined = index < options_.worker_count;
    attached.from = 1;
    actions->push_back(Of(Kind::kAttached, index, -1, 0));
  }
  return absl::OkStatus();
}

int RoundCore::WorkerOf(const base::MemberId& member) const {
  for (const auto& [worker, entry] : workers_) {
    if (entry.id == member) return worker;
  }
  return -1;
}

std::vector<int> RoundCore::NotYetAttached() const {
  std::vector<int> missing;
  for (int worker = 0; !assembled_ && worker < options_.worker_count; ++worker) {
    if (workers_.count(worker) == 0) missing.push_back(worker);
  }
  return missing;
}

bool RoundCore::IsJoined(int worker) const {
  auto found = workers_.find(worker);
  return found != workers_.end() && found->second.joined && found->second.last == INT64_MAX;
}

int64_t RoundCore::NextStep(int worker) const {
  if (!options_.sync) {
    auto found = pushed_.find(worker);
    return found == pushed_.end() ? 1 : found->second + 1;
  }
  int64_t step = current_;
  for (const Round& round : rounds_) {
    if (round.begun || round.touched) step = round.step + 1;
  }
  return step;
}

bool RoundCore::Join(int worker, int64_t from_step, std::vector<Action>* actions) {
  Member& member = workers_.at(worker);
  if (member.joined && member.from == from_step && member.last == INT64_MAX) return true;  // A repeat.
  if (from_step < NextStep(worker)) return false;
  member.joined = true;
  member.from = from_step;
  member.last = INT64_MAX;
  if (options_.sync) {
    DropFromRounds(worker, 0, from_step, actions);  // Also ends rounds that nobody attends.
  } else {
    pushed_[worker] = from_step - 1;
  }
  return true;
}

void RoundCore::Leave(int worker, int64_t after_step, std::vector<Action>* actions) {
  Member& member = workers_.at(worker);
  member.last = std::min(member.last, after_step);
  DropFromRounds(worker, after_step + 1, INT64_MAX, actions);
}

void RoundCore::Gone(const base::MemberId& member, std::vector<Action>* actions) {
  int worker = WorkerOf(member);
  if (worker < 0) return;
  workers_.erase(worker);
  for (auto& pending : pending_) pending.erase(worker);
  actions->push_back(Of(Kind::kDrop, worker, -1, 0));
  DropFromRounds(worker, 0, INT64_MAX, actions);
}

// `worker` is waited for no more in the open rounds of steps from_step .. before_step - 1.
void RoundCore::DropFromRounds(int worker, int64_t from_step, int64_t before_step,
                               std::vector<Action>* actions) {
  bool dropped = false;
  for (Round& round : rounds_) {
    if (round.step >= from_step && round.step < before_step) dropped |= round.expected.erase(worker) > 0;
  }
  for (int chunk = 0; dropped && chunk < options_.chunks; ++chunk) Advance(chunk, actions);
  SkipDeserted(actions);
}

// The first step from the current one on that a member is there for, or that was pushed already.
int64_t RoundCore::FirstAttended() const {
  int64_t first = rounds_[1].begun || rounds_[1].touched ? rounds_[1].step : INT64_MAX;
  for (const auto& [worker, member] : workers_) {
    if (!member.joined || member.last < current_ || member.last < member.from) continue;
    first = std::min(first, std::max(member.from, current_));
  }
  return first;
}

// Ends rounds that have not begun and that no member is left to begin: else those who joined from a later
// step would wait for nobody. Where there is nobody at all, the current round waits for the next to join.
void RoundCore::SkipDeserted(std::vector<Action>* actions) {
  while (options_.sync && !rounds_[0].begun) {
    const int64_t target = FirstAttended();
    if (target == current_ || target == INT64_MAX) return;
    for (int chunk = 0; chunk < options_.chunks; ++chunk) {
      if (chunks_[chunk].applied >= target - 1) continue;
      chunks_[chunk].applied = target - 1;
      chunks_[chunk].contributors.clear();
      actions->push_back(Of(Kind::kSkip, -1, chunk, target - 1));
    }
    if (target == current_ + 1) {
      rounds_[0].done = options_.chunks;
      PopCompleteRounds();
    } else {
      current_ = target;
      rounds_ = {NewRound(target), NewRound(target + 1)};
    }
    for (int chunk = 0; chunk < options_.chunks; ++chunk) Advance(chunk, actions);
  }
}

// ---- Contributions --------------------------------------------------------------------------------------

Verdict RoundCore::Contribute(int worker, int64_t step, int chunk, uint64_t hyper, absl::Time now) {
  const Member& member = workers_.at(worker);
  if (step < 1)
    return Refused(absl::InvalidArgumentError(absl::StrCat("step ", step, ": steps count from 1")));
  if (!member.joined) {
    return Refused(absl::FailedPreconditionError(
        absl::StrCat("worker ", worker, " has not joined: join from step ", NextStep(worker), " or later")));
  }
  if (step > member.last) {
    return Refused(absl::FailedPreconditionError(
        absl::StrCat("worker ", worker, " left after step ", member.last, "; it pushes step ", step)));
  }
  if (step < member.from) {
    return Refused(absl::FailedPreconditionError(absl::StrCat("worker ", worker, " takes part from step ",
                                                              member.from, " on; it pushes step ", step)));
  }
  if (!options_.sync) return ContributeAsync(worker, step, chunk);
  return ContributeSync(worker, step, chunk, hyper, now);
}

Verdict RoundCore::RefusePast(int worker, int64_t step, int chunk) const {
  const ChunkState& state = chunks_[chunk];
  if (step == state.applied) {
    return Refused(absl::FailedPreconditionError(absl::StrCat(
        "round ", step, " of chunk ", chunk + options_.first_chunk, " went on without worker ", worker,
        ", with ", state.contributors.size(), " contributors; the next step is ", NextStep(worker))));
  }
  return Refused(
      absl::FailedPreconditionError(absl::StrCat("step ", step, " of chunk ", chunk + options_.first_chunk,
                                                 " is past: its last applied step is ", state.applied)));
}

Verdict RoundCore::ContributeSync(int worker, int64_t step, int chunk, uint64_t hyper, absl::Time now) {
  const ChunkState& state = chunks_[chunk];
  if (step <= state.applied) {
    if (step < state.applied || state.contributors.count(worker) == 0) return RefusePast(worker, step, chunk);
    Verdict verdict{Verdict::Kind::kRepeated, false, absl::OkStatus(), {}};
    AwaitReply(worker, chunk, {step, true, static_cast<int>(state.contributors.size())}, &verdict.actions);
    return verdict;
  }
  Round* round = FindRound(step);
  if (round == nullptr) {
    return Refused(
        absl::FailedPreconditionError(absl::StrCat("step ", step, " is in the future: the current is ",
                                                   current_, ", at most ", current_ + 1, " is taken")));
  }
  if (round->parts[chunk].in.count(worker) > 0) {
    Verdict verdict{Verdict::Kind::kRepeated, false, absl::OkStatus(), {}};
    AwaitReply(worker, chunk, {step, false, 0}, &verdict.actions);
    return verdict;
  }
  if (round->begun && round->expected.count(worker) == 0) {
    return Refused(absl::FailedPreconditionError(
        absl::StrCat("worker ", worker, " is not in the roster of round ", step, ", which has begun")));
  }
  if (round->begun && round->hyper != hyper) {
    Verdict verdict = Refused(absl::InvalidArgumentError(
        absl::StrCat("round ", step, "'s hyper-parameters were set by worker ", round->hyper_from,
                     "; worker ", worker, "'s differ: all workers of a round must use the same")));
    verdict.disagrees = true;
    return verdict;
  }
  if (parked_ >= options_.max_parked && !IsNextInOrder(worker, step, chunk)) {
    return Refused(absl::ResourceExhaustedError(
        absl::StrCat(parked_, " contributions wait for lower ranks' (chunk ", chunk + options_.first_chunk,
                     " of step ", step, "): push this one again later")));
  }
  if (!round->begun) Begin(*round, hyper, worker, now);
  Verdict verdict{Verdict::Kind::kTaken, false, absl::OkStatus(), {}};
  round->parts[chunk].in[worker] = false;
  ++parked_;
  AwaitReply(worker, chunk, {step, false, 0}, &verdict.actions);
  Advance(chunk, &verdict.actions);
  return verdict;
}

void RoundCore::Begin(Round& round, uint64_t hyper, int worker, absl::Time now) {
  round.begun = true;
  round.hyper = hyper;
  round.hyper_from = worker;
  round.deadline = now + options_.round_limit;
  for (const auto& [index, member] : workers_) {
    if (member.joined && member.from <= round.step && round.step <= member.last) round.expected.insert(index);
  }
}

Verdict RoundCore::ContributeAsync(int worker, int64_t step, int chunk) {
  int64_t& pushed = pushed_[worker];
  int64_t& last = chunks_[chunk].last_pushed[worker];
  if (step <= last) {
    Verdict verdict{Verdict::Kind::kRepeated, false, absl::OkStatus(), {}};
    AwaitReply(worker, chunk, {step, true, 1}, &verdict.actions);
    return verdict;
  }
  if (step < pushed || step > pushed + 1) {
    return Refused(absl::FailedPreconditionError(
        absl::StrCat("worker ", worker, " is at step ", pushed, "; it pushes step ", step, " of chunk ",
                     chunk + options_.first_chunk, ": expected ", pushed, " or ", pushed + 1)));
  }
  if (step > pushed) ++begun_count_;
  pushed = step;
  last = step;
  ++chunks_[chunk].applied;
  Verdict verdict{Verdict::Kind::kTaken, false, absl::OkStatus(), {}};
  verdict.actions.push_back(Of(Kind::kFold, worker, chunk, step));
  verdict.actions.push_back(Of(Kind::kApply, -1, chunk, step, 1));
  AwaitReply(worker, chunk, {step, true, 1}, &verdict.actions);
  return verdict;
}

// ---- Applying and answering -----------------------------------------------------------------------------

void RoundCore::AwaitReply(int worker, int chunk, Pending pending, std::vector<Action>* actions) {
  if (pending.applied && pending.step <= workers_.at(worker).landing) {
    pending_[chunk].erase(worker);
    actions->push_back(Of(Kind::kReply, worker, chunk, pending.step, pending.contributors));
    return;
  }
  pending_[chunk][worker] = pending;
}

void RoundCore::OpenLanding(int worker, int64_t step, std::vector<Action>* actions) {
  Member& member = workers_.at(worker);
  member.landing = std::max(member.landing, step);
  for (int chunk = 0; chunk < options_.chunks; ++chunk) {
    auto found = pending_[chunk].find(worker);
    if (found == pending_[chunk].end() || !found->second.applied || found->second.step > member.landing)
      continue;
    actions->push_back(Of(Kind::kReply, worker, chunk, found->second.step, found->second.contributors));
    pending_[chunk].erase(found);
  }
}

// Folds what is in order on `chunk` and applies what is complete.
void RoundCore::Advance(int chunk, std::vector<Action>* actions) {
  while (true) {
    Round* round = FindRound(chunks_[chunk].applied + 1);
    if (round == nullptr || !(round->begun || round->touched)) break;
    int missing = FirstMissing(*round, chunk);
    for (auto& [worker, folded] : round->parts[chunk].in) {
      if (worker > missing) break;
      if (folded) continue;
      folded = true;
      --parked_;
      actions->push_back(Of(Kind::kFold, worker, chunk, round->step));
    }
    // A failed round that waits for its first new contribution has an empty roster, and is not complete.
    if (missing != INT32_MAX || !round->begun) break;
    Complete(*round, chunk, actions);
  }
  PopCompleteRounds();
  SkipDeserted(actions);
}

void RoundCore::Complete(Round& round, int chunk, std::vector<Action>* actions) {
  ChunkState& state = chunks_[chunk];
  state.applied = round.step;
  state.contributors.clear();
  for (const auto& [worker, folded] : round.parts[chunk].in) state.contributors.insert(worker);
  int contributors = static_cast<int>(state.contributors.size());
  actions->push_back(Of(contributors > 0 ? Kind::kApply : Kind::kSkip, -1, chunk, round.step, contributors));
  round.parts[chunk].in.clear();
  round.touched = true;
  ++round.done;
  std::map<int, Pending> waiting = pending_[chunk];
  for (auto& [worker, pending] : waiting) {
    if (pending.step == round.step) AwaitReply(worker, chunk, {round.step, true, contributors}, actions);
  }
}

void RoundCore::PopCompleteRounds() {
  while (!rounds_.empty() && options_.chunks > 0 && rounds_.front().done == options_.chunks) {
    rounds_.pop_front();
    ++current_;
    rounds_.push_back(NewRound(current_ + 1));
  }
}

bool RoundCore::IsNextInOrder(int worker, int64_t step, int chunk) const {
  if (!options_.sync) return true;
  const Round* round = FindRound(step);
  if (round == nullptr || step != chunks_[chunk].applied + 1) return false;
  if (round->begun) return FirstMissing(*round, chunk) == worker;
  for (const auto& [index, member] : workers_) {  // The roster as it would be fixed now.
    if (member.joined && member.from <= step && step <= member.last) return index == worker;
  }
  return false;
}

// ---- Time -----------------------------------------------------------------------------------------------

absl::Time RoundCore::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Round& round : rounds_) next = std::min(next, round.deadline);
  return next;
}

void RoundCore::Tick(absl::Time now, std::vector<Action>* actions) {
  for (Round& round : rounds_) {
    if (!round.begun || now < round.deadline) continue;
    std::set<int> missing;
    for (int chunk = 0; chunk < options_.chunks; ++chunk) {
      if (chunks_[chunk].applied >= round.step) continue;
      for (int worker : round.expected) {
        if (round.parts[chunk].in.count(worker) == 0) missing.insert(worker);
      }
    }
    std::vector<std::string> names;
    for (int worker : missing)
      names.push_back(absl::StrCat("worker ", worker, " (", workers_.at(worker).id.ToString(), ")"));
    absl::Status status = absl::DeadlineExceededError(absl::StrCat(
        "round ", round.step, " did not complete within ", absl::FormatDuration(options_.round_limit),
        missing.empty() ? ": the round before it is open" : ": no gradient from ",
        absl::StrJoin(names, ", ")));
    for (int chunk = 0; chunk < options_.chunks; ++chunk) {
      if (chunks_[chunk].applied >= round.step) continue;
      for (const auto& [worker, folded] : round.parts[chunk].in) parked_ -= folded ? 0 : 1;
      if (!round.parts[chunk].in.empty()) actions->push_back(Of(Kind::kDiscard, -1, chunk, round.step));
      round.parts[chunk].in.clear();
      std::vector<int> waiting;
      for (const auto& [worker, pending] : pending_[chunk]) {
        if (pending.step == round.step) waiting.push_back(worker);
      }
      for (int worker : waiting) {
        pending_[chunk].erase(worker);
        Action refuse = Of(Kind::kRefuse, worker, chunk, round.step);
        refuse.status = status;
        actions->push_back(std::move(refuse));
      }
    }
    round.begun = false;
    round.expected.clear();
    round.deadline = absl::InfiniteFuture();
  }
}

// ---- Invariants -----------------------------------------------------------------------------------------

absl::Status RoundCore::CheckInvariants() const {
  auto broken = [](auto... what) { return absl::InternalError(absl::StrCat(what...)); };
  int64_t parked = 0;
  for (const Round& round : rounds_) {
    int done = 0;
    for (int chunk = 0; chunk < options_.chunks; ++chunk) {
      const auto& in = round.parts[chunk].in;
      if (chunks_[chunk].applied >= round.step) {
        ++done;
        if (!in.empty()) return broken("chunk ", chunk, " holds contributions to a step that was applied");
        continue;
      }
      int missing = FirstMissing(round, chunk);
      bool turn = chunks_[chunk].applied + 1 == round.step;
      if (!in.empty() && !round.begun) return broken("a contribution in a round that has not begun");
      if (round.begun && turn && missing == INT32_MAX)
        return broken("chunk ", chunk, " is complete, not applied");
      for (const auto& [worker, folded] : in) {
        if (folded != (turn && worker < missing)) {
          return broken("worker ", worker, "'s part of chunk ", chunk,
                        folded ? " was folded out of order" : " is not folded");
        }
        parked += folded ? 0 : 1;
      }
    }
    if (done != round.done)
      return broken("round ", round.step, " counts ", round.done, " chunks, has ", done);
    for (int worker : round.expected) {
      if (workers_.count(worker) == 0)
        return broken("round ", round.step, " waits for worker ", worker, ", who is gone");
    }
    if (round.begun != (round.deadline != absl::InfiniteFuture()))
      return broken("a round without its deadline");
  }
  if (parked != parked_) return broken(parked_, " parked by count, ", parked, " in truth");
  if (options_.sync && !rounds_[0].begun && FirstAttended() != INT64_MAX && FirstAttended() != current_) {
    return broken("nobody is there to begin round ", current_);
  }
  if (options_.sync && (rounds_.size() != 2 || rounds_[0].step != current_)) return broken("the open rounds");
  for (int chunk = 0; chunk < options_.chunks; ++chunk) {
    int64_t applied = chunks_[chunk].applied;
    if (options_.sync && (applied < current_ - 1 || applied > current_ + 1))
      return broken("chunk ", chunk, " ran away");
    for (const auto& [worker, pending] : pending_[chunk]) {
      auto member = workers_.find(worker);
      if (member == workers_.end()) return broken("an answer is owed to worker ", worker, ", who is gone");
      if (pending.applied && pending.step <= member->second.landing) return broken("an answer is late");
      const Round* round = FindRound(pending.step);
      if (!pending.applied && (round == nullptr || round->parts[chunk].in.count(worker) == 0)) {
        return broken("worker ", worker, " waits for step ", pending.step, " of chunk ", chunk,
                      " without a part in it");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace Atoll::shard_optim
