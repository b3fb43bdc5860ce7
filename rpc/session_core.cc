#include "atoll/rpc/session_core.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/base/text.h"

namespace Atoll::rpc {
namespace {

constexpr int kMaxStallDoublings = 10;

constexpr transport::Lane kLanes[] = {transport::Lane::kControl, transport::Lane::kBulk};

absl::string_view LaneName(transport::Lane lane) {
  return lane == transport::Lane::kControl ? "control" : "bulk";
}

}  // namespace

SessionCore::Action& SessionCore::Emit(Action::Kind kind, Lane lane) {
  Action& action = actions_.emplace_back();
  action.kind = kind;
  action.lane = lane;
  action.pipe = LaneOf(lane).pipe;
  return action;
}

std::vector<SessionCore::Action> SessionCore::TakeActions() { return std::exchange(actions_, {}); }

// Sending.

bool SessionCore::HasRoom(Lane lane, size_t bytes, size_t reserved) const {
  const LaneState& state = LaneOf(lane);
  if (state.unacked.empty() && queued_bytes_ == 0 && reserved == 0) return true;
  const size_t waiting = queued_bytes_ + reserved + bytes;
  const bool queues = state.state != State::kOpen || !state.queue.empty();
  return state.unacked_bytes + waiting <= options_.window_bytes &&
         (!queues || waiting <= options_.queue_bytes);
}

bool SessionCore::Admits(const LaneState& lane, size_t bytes) const {
  return lane.unacked.empty() || lane.unacked_bytes + bytes <= options_.window_bytes;
}

absl::Status SessionCore::Post(OutMessagePtr message, absl::Time now, bool force) {
  if (dead_) return death_;
  const Lane lane = message->lane;
  LaneState& state = LaneOf(lane);
  if (state.state == State::kOpen && state.queue.empty() && Admits(state, message->bytes)) {
    Send(lane, std::move(message), now);
    return absl::OkStatus();
  }
  if (!force && queued_bytes_ > 0 && queued_bytes_ + message->bytes > options_.queue_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat("the queue to it is full: ", queued_bytes_,
                                                     " bytes wait, ", state.unacked_bytes,
                                                     " are not yet received"));
  }
  // Answers. Whoever asks and asks and receives none of them is not waited for without end.
  if (force && queued_bytes_ + message->bytes > options_.queue_bytes + options_.forced_bytes) {
    Die(absl::ResourceExhaustedError(
        absl::StrCat("it sends requests and does not receive the answers: ", queued_bytes_, " bytes wait")));
    return death_;
  }
  queued_bytes_ += message->bytes;
  state.queue.push_back(std::move(message));
  Want(lane, now);
  return absl::OkStatus();
}

// A pipe may be dead without a word: its host gone, a firewall that forgot it.
void SessionCore::AwaitAck(LaneState& state, absl::Time now) const {
  const absl::Duration limit = options_.stall_limit + absl::Seconds(static_cast<double>(state.unacked_bytes) /
                                                                    static_cast<double>(options_.stall_rate));
  state.stalled_at = state.unacked.empty() || state.state != State::kOpen
                         ? absl::InfiniteFuture()
                         : now + limit * std::exp2(std::min(state.stalls, kMaxStallDoublings));
  state.awaited_since = now;
}

void SessionCore::Send(Lane lane, OutMessagePtr message, absl::Time now) {
  LaneState& state = LaneOf(lane);
  message->number = state.next_number++;
  state.unacked_bytes += message->bytes;
  state.unacked.push_back({message->number, message->bytes, message});
  Action& action = Emit(Action::Kind::kWrite, lane);
  action.number = message->number;
  action.ack_now = message->ack_now;
  action.message = std::move(message);
  action.acks = TakeAcks();
  if (state.unacked.size() == 1) AwaitAck(state, now);
}

void SessionCore::Pump(Lane lane, absl::Time now) {
  LaneState& state = LaneOf(lane);
  while (state.state == State::kOpen && !state.queue.empty() && Admits(state, state.queue.front()->bytes)) {
    OutMessagePtr message = std::move(state.queue.front());
    state.queue.pop_front();
    queued_bytes_ -= message->bytes;
    Send(lane, std::move(message), now);
  }
}

bool SessionCore::Withdraw(const OutMessage* message, absl::Time now) {
  LaneState& state = LaneOf(message->lane);
  if (message->number == 0) {
    auto found = std::find_if(state.queue.begin(), state.queue.end(),
                              [&](const OutMessagePtr& queued) { return queued.get() == message; });
    if (found == state.queue.end()) return true;
    queued_bytes_ -= (*found)->bytes;
    state.queue.erase(found);
    Pump(message->lane, now);
    return true;
  }
  if (!state.unacked.empty() && message->number >= state.unacked.front().number) {
    state.unacked[message->number - state.unacked.front().number].message = nullptr;
  }
  return false;
}

absl::Status SessionCore::OnAcks(const Acks& acks, absl::Time now) {
  if (dead_) return absl::OkStatus();
  for (Lane lane : kLanes) {
    LaneState& state = LaneOf(lane);
    uint64_t ack = acks[static_cast<size_t>(lane)];
    if (ack >= state.next_number) {
      return absl::InvalidArgumentError(absl::StrCat("it acknowledged message ", ack, " on ", LaneName(lane),
                                                     ", and only ", state.next_number - 1, " were sent"));
    }
    const bool progress = !state.unacked.empty() && state.unacked.front().number <= ack;
    while (!state.unacked.empty() && state.unacked.front().number <= ack) {
      Unacked& first = state.unacked.front();
      state.unacked_bytes -= first.bytes;
      if (first.message != nullptr) Emit(Action::Kind::kAcked, lane).message = std::move(first.message);
      state.unacked.pop_front();
    }
    if (progress) {
      state.stalls = 0;
      Carried(state);
      AwaitAck(state, now);
    }
    Pump(lane, now);
  }
  return absl::OkStatus();
}

// Receiving.

SessionCore::Verdict SessionCore::OnAnnounced(PipeId pipe, Lane lane, uint64_t number) const {
  const LaneState& state = LaneOf(lane);
  if (dead_ || state.pipe != pipe || state.state != State::kOpen) return Verdict::kStale;
  if (number == state.last_received + 1) return Verdict::kNew;
  return number <= state.last_received && number != 0 ? Verdict::kDuplicate : Verdict::kGap;
}

bool SessionCore::OnReceived(Lane lane, uint64_t number, size_t bytes, bool ack_now, absl::Time now) {
  LaneState& state = LaneOf(lane);
  if (dead_ || number != state.last_received + 1) return false;
  state.last_received = number;
  Carried(state);
  ++owed_count_;
  owed_bytes_ += bytes;
  if (ack_now || owed_count_ >= options_.ack_every || owed_bytes_ >= options_.ack_bytes) {
    Acknowledge();
  } else if (ack_at_ == absl::InfiniteFuture()) {
    ack_at_ = now + options_.ack_delay;
  }
  return true;
}

void SessionCore::Acknowledge() {
  // Without a pipe the next hello tells it.
  for (Lane lane : kLanes) {
    if (!open(lane)) continue;
    Emit(Action::Kind::kAck, lane).acks = TakeAcks();
    return;
  }
  ack_at_ = absl::InfiniteFuture();
}

Acks SessionCore::TakeAcks() {
  owed_count_ = 0;
  owed_bytes_ = 0;
  ack_at_ = absl::InfiniteFuture();
  return {lanes_[0].last_received, lanes_[1].last_received};
}

// Connecting.

void SessionCore::Want(Lane lane, absl::Time now) {
  LaneState& state = LaneOf(lane);
  if (state.state == State::kOpen || leaving_ || dead_) return;
  // Under way, but so far it was no matter of life and death (OnAskedForBulk).
  if (state.give_up_at == absl::InfiniteFuture()) state.give_up_at = now + options_.reconnect_limit;
  if (state.state != State::kIdle) return;
  state.fruitless_since = absl::InfiniteFuture();
  if (options_.can_connect) {
    Connect(lane, now);
  } else {
    Backoff(lane, options_.passive_wait, absl::UnavailableError("it has told no address"), now);
  }
}

void SessionCore::SetCanConnect(absl::Time now) {
  options_.can_connect = true;
  for (Lane lane : kLanes) {
    LaneState& state = LaneOf(lane);
    if (state.state == State::kBackoff) state.retry_at = std::min(state.retry_at, now);
  }
  OnTimer(now);
}

void SessionCore::Connect(Lane lane, absl::Time now) {
  LaneState& state = LaneOf(lane);
  state.state = State::kConnecting;
  state.retry_at = absl::InfiniteFuture();
  Emit(Action::Kind::kConnect, lane).attempt = ++state.attempt;
}

void SessionCore::Backoff(Lane lane, absl::Duration wait, absl::Status error, absl::Time now) {
  LaneState& state = LaneOf(lane);
  state.pipe = 0;
  state.last_error = std::move(error);
  if (leaving_) {
    state.state = State::kIdle;
    state.retry_at = state.give_up_at = absl::InfiniteFuture();
    return;
  }
  // The bulk lane is opened again only when there is something to send.
  if (lane == Lane::kBulk && state.queue.empty() && state.unacked.empty()) {
    state.state = State::kIdle;
    state.retry_at = state.give_up_at = absl::InfiniteFuture();
    return;
  }
  state.state = State::kBackoff;
  state.retry_at = now + wait;
  if (state.give_up_at == absl::InfiniteFuture()) state.give_up_at = now + options_.reconnect_limit;
  if (!options_.can_connect) AskForBulk();
}

// We may be out of the other side's reach while it is within ours, or the other way round: behind a mapped port, say.
void SessionCore::AskForBulk() {
  if (LaneOf(Lane::kBulk).state != State::kBackoff || !open(Lane::kControl)) return;
  Action& action = Emit(Action::Kind::kAck, Lane::kControl);
  action.acks = TakeAcks();
  action.open_bulk = true;
}

void SessionCore::OnAskedForBulk(absl::Time now) {
  LaneState& state = LaneOf(Lane::kBulk);
  if (state.state != State::kIdle || now < state.deaf_until) return;
  state.deaf_until = now + options_.asked_wait / 2;
  Want(Lane::kBulk, now);
  // For us it is no matter of life and death. (The limit comes with something to send: Want.)
  if (state.queue.empty() && state.unacked.empty()) state.give_up_at = absl::InfiniteFuture();
}

void SessionCore::OnConnected(Lane lane, uint64_t attempt, PipeId pipe, absl::Time now) {
  LaneState& state = LaneOf(lane);
  if (dead_ || state.state != State::kConnecting || attempt != state.attempt) {
    Action& action = Emit(Action::Kind::kClose, lane);
    action.pipe = pipe;
    action.status = dead_ ? death_ : absl::AbortedError("another pipe took its place");
    return;
  }
  state.state = State::kGreeting;
  state.pipe = pipe;
  state.by_us = true;
  state.retry_at = now + options_.greeting_limit;
  Greet(lane);
}

void SessionCore::Greet(Lane lane) {
  LaneState& state = LaneOf(lane);
  Action& action = Emit(Action::Kind::kHello, lane);
  action.hello.attempt = state.attempt;
  action.hello.accepted = state.accepted;
  action.acks = TakeAcks();
}

void SessionCore::OnConnectFailed(Lane lane, uint64_t attempt, Failure failure, absl::Status status,
                                  absl::Time now) {
  LaneState& state = LaneOf(lane);
  if (dead_ || state.state != State::kConnecting || attempt != state.attempt) return;
  // A pipe on the other lane is the better witness: its end will show whether the process is gone.
  if (open(lane == Lane::kControl ? Lane::kBulk : Lane::kControl)) failure = Failure::kTransient;
  if (failure == Failure::kFatal || (failure == Failure::kRefused && ++state.refusals >= options_.refusals)) {
    Die(std::move(status));
    return;
  }
  if (failure != Failure::kRefused) state.refusals = 0;
  LengthenBackoff(state);
  const bool asks = lane == Lane::kBulk && open(Lane::kControl);
  Backoff(lane, asks ? std::max(state.backoff, options_.asked_wait) : state.backoff, std::move(status), now);
  AskForBulk();
}

void SessionCore::OnHello(PipeId pipe, Lane lane, bool initiated, const Hello& hello, const Acks& acks,
                          absl::Time now) {
  LaneState& state = LaneOf(lane);
  auto refuse = [&](absl::string_view why) {
    Action& action = Emit(Action::Kind::kClose, lane);
    action.pipe = pipe;
    action.status = dead_ ? death_ : absl::AbortedError(why);
  };
  if (dead_) return refuse("");
  if (initiated) {
    if (state.state != State::kGreeting || state.pipe != pipe) return refuse("another pipe took its place");
    return Open(lane, pipe, true, acks, now);
  }
  if (hello.attempt <= state.accepted) return refuse("an attempt that is older than the last");
  // While we connect ourselves, or hold a pipe of ours that they had not seen when they sent this: the pipe
  // of the side that wins ties stays. What they have accepted and connect again after is lost.
  bool ours_unseen = hello.accepted < state.attempt;
  bool connecting = state.state == State::kConnecting || state.state == State::kGreeting;
  if (connecting && options_.wins_ties && ours_unseen) return refuse("both sides connected, and ours stays");
  if (state.state == State::kOpen && state.by_us && ours_unseen) return refuse("the pipe is open already");
  if (state.pipe != 0) {
    Action& action = Emit(Action::Kind::kClose, lane);
    action.status = absl::AbortedError("another pipe took its place");
  }
  state.accepted = hello.attempt;
  state.pipe = pipe;
  Greet(lane);
  Open(lane, pipe, false, acks, now);
}

void SessionCore::Open(Lane lane, PipeId pipe, bool by_us, const Acks& acks, absl::Time now) {
  LaneState& state = LaneOf(lane);
  // Not open while the acknowledgements are taken: what they let go must not overtake what is sent again.
  state.state = State::kGreeting;
  state.pipe = pipe;
  state.by_us = by_us;
  absl::Status status = OnAcks(acks, now);
  if (!status.ok()) {
    Emit(Action::Kind::kClose, lane).status = status;
    if (state.give_up_at == absl::InfiniteFuture()) state.give_up_at = now + options_.reconnect_limit;
    OnPipeClosed(pipe, status, now);
    return;
  }
  state.state = State::kOpen;
  state.retry_at = state.give_up_at = absl::InfiniteFuture();
  state.opened_at = now;
  if (state.fruitless_since == absl::InfiniteFuture()) state.backoff = absl::ZeroDuration();
  state.refusals = 0;
  for (const Unacked& unacked : state.unacked) {
    Action& action = Emit(Action::Kind::kWrite, lane);
    action.number = unacked.number;
    action.message = unacked.message;
    action.ack_now = unacked.message != nullptr && unacked.message->ack_now;
    action.acks = TakeAcks();
  }
  AwaitAck(state, now);
  Pump(lane, now);
  if (!options_.can_connect) AskForBulk();
}

void SessionCore::OnPipeClosed(PipeId pipe, const absl::Status& status, absl::Time now) {
  if (dead_ || pipe == 0) return;
  for (Lane lane : kLanes) {
    LaneState& state = LaneOf(lane);
    if (state.pipe != pipe) continue;
    state.stalled_at = absl::InfiniteFuture();
    if (state.state == State::kGreeting) {
      LengthenBackoff(state);
      Backoff(lane, state.backoff, status, now);
      return;
    }
    if (now - state.opened_at >= options_.short_life) Carried(state);
    if (state.fruitless_since != absl::InfiniteFuture()) {
      LengthenBackoff(state);
      state.give_up_at = state.fruitless_since + options_.reconnect_limit;
      Backoff(lane, state.by_us ? state.backoff : std::max(state.backoff, options_.passive_wait), status,
              now);
      return;
    }
    state.fruitless_since = now;
    // The side that connected tries at once; the other lets it come.
    bool at_once = state.by_us && options_.can_connect;
    Backoff(lane, at_once ? absl::ZeroDuration() : options_.passive_wait, status, now);
    if (at_once && state.state == State::kBackoff) Connect(lane, now);
    return;
  }
}

void SessionCore::LengthenBackoff(LaneState& state) const {
  state.backoff = state.backoff == absl::ZeroDuration() ? options_.first_backoff
                                                        : std::min(2 * state.backoff, options_.last_backoff);
}

void SessionCore::Carried(LaneState& state) {
  state.fruitless_since = absl::InfiniteFuture();
  state.backoff = absl::ZeroDuration();
}

// Time and end.

absl::Time SessionCore::NextTimer() const {
  if (dead_) return absl::InfiniteFuture();
  absl::Time next = ack_at_;
  for (const LaneState& lane : lanes_)
    next = std::min({next, lane.retry_at, lane.give_up_at, lane.stalled_at});
  return next;
}

void SessionCore::OnTimer(absl::Time now) {
  if (dead_) return;
  if (ack_at_ <= now) Acknowledge();
  for (Lane lane : kLanes) {
    LaneState& state = LaneOf(lane);
    if (state.give_up_at <= now) {
      Die(absl::UnavailableError(
          absl::StrCat("no connection for ", base::DurationText(options_.reconnect_limit),
                       state.last_error.ok() ? "" : "; the last attempt: ", state.last_error.message())));
      return;
    }
    if (state.stalled_at <= now) {
      ++state.stalls;
      absl::Status status = absl::DeadlineExceededError(
          absl::StrCat("it has acknowledged nothing for ", base::DurationText(now - state.awaited_since),
                       ", of ", state.unacked.size(), " messages with ", state.unacked_bytes, " bytes"));
      Emit(Action::Kind::kClose, lane).status = status;
      Carried(state);  // It did not end by itself.
      OnPipeClosed(state.pipe, status, now);
    }
    if (state.retry_at > now) continue;
    if (state.state == State::kBackoff) {
      if (options_.can_connect) {
        Connect(lane, now);
      } else {
        // The other side may not have seen yet that its last pipe is gone: it is asked again.
        state.retry_at = lane == Lane::kBulk ? now + options_.last_backoff : absl::InfiniteFuture();
        AskForBulk();
      }
    } else if (state.state == State::kGreeting) {
      absl::Status status = absl::DeadlineExceededError("it accepted the connection and said nothing");
      Emit(Action::Kind::kClose, lane).status = status;
      OnPipeClosed(state.pipe, status, now);
    }
  }
}

void SessionCore::Die(absl::Status status) {
  if (dead_) return;
  for (Lane lane : kLanes) {
    LaneState& state = LaneOf(lane);
    if (state.pipe != 0) Emit(Action::Kind::kClose, lane).status = status;
    for (Unacked& unacked : state.unacked) {
      if (unacked.message == nullptr) continue;
      Action& action = Emit(Action::Kind::kDropped, lane);
      action.message = std::move(unacked.message);
      action.sent = true;
    }
    for (OutMessagePtr& queued : state.queue) {
      Emit(Action::Kind::kDropped, lane).message = std::move(queued);
    }
    state.unacked.clear();
    state.queue.clear();
    state.unacked_bytes = 0;
    state.pipe = 0;
    state.state = State::kIdle;
    state.retry_at = state.give_up_at = state.stalled_at = absl::InfiniteFuture();
  }
  queued_bytes_ = 0;
  ack_at_ = absl::InfiniteFuture();
  dead_ = true;
  death_ = status;
  Emit(Action::Kind::kDead, Lane::kControl).status = std::move(status);
}

void SessionCore::SayBye() {
  if (dead_) return;
  leaving_ = true;
  for (Lane lane : kLanes) {
    if (!open(lane)) continue;
    Emit(Action::Kind::kBye, lane);
    return;
  }
}

bool SessionCore::drained() const { return unacked_count() == 0 && queued_count() == 0; }

bool SessionCore::reachable() const {
  return options_.can_connect || std::any_of(std::begin(lanes_), std::end(lanes_), [](const LaneState& lane) {
           return lane.state == State::kGreeting || lane.state == State::kOpen;
         });
}

void SessionCore::CheckInvariants() const {
  size_t queued = 0;
  for (const LaneState& lane : lanes_) {
    size_t unacked = 0;
    uint64_t number = lane.next_number - lane.unacked.size();
    for (const Unacked& entry : lane.unacked) {
      ATOLL_CHECK(entry.number == number++) << "unacknowledged numbers have a gap";
      unacked += entry.bytes;
    }
    ATOLL_CHECK(unacked == lane.unacked_bytes);
    ATOLL_CHECK(lane.unacked.size() <= 1 || unacked <= options_.window_bytes) << "beyond the window";
    for (const OutMessagePtr& message : lane.queue) queued += message->bytes;
    ATOLL_CHECK((lane.pipe != 0) == (lane.state == State::kGreeting || lane.state == State::kOpen));
    bool wanted = lane.state != State::kIdle && lane.state != State::kOpen;
    const bool limited = lane.give_up_at != absl::InfiniteFuture();
    const bool asked_for = &lane == &LaneOf(Lane::kBulk) && lane.queue.empty() && lane.unacked.empty();
    ATOLL_CHECK(wanted ? limited || asked_for : !limited) << "a limit is missing, or left";
    ATOLL_CHECK((lane.state == State::kOpen && !lane.unacked.empty()) ==
                (lane.stalled_at != absl::InfiniteFuture()))
        << "nobody watches what is not acknowledged";
    ATOLL_CHECK(lane.queue.empty() || lane.state != State::kIdle || leaving_) << "nobody connects";
    ATOLL_CHECK(lane.queue.empty() || lane.state != State::kOpen || !lane.unacked.empty()) << "stuck";
  }
  ATOLL_CHECK(queued == queued_bytes_);
}

}  // namespace Atoll::rpc
