#include "atoll/rpc/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/clock.h"
#include "atoll/base/log.h"
#include "atoll/rpc/session_state.h"
#include "atoll/rpc/user_code.h"
#include "atoll/transport/refusal.h"

namespace Atoll::rpc {
namespace {

constexpr absl::Duration kConnectLimit = absl::Seconds(10);
// Of pipes that came in: for the first word, and how many may owe it at once.
constexpr absl::Duration kGreetingLimit = absl::Seconds(10);
constexpr int kMaxUngreeted = 8;

SessionCore::Options CoreOptions(const AgentOptions& options, const Peer& peer) {
  SessionCore::Options core;
  // Names differ within a job, so that the order is known before the peer's incarnation is.
  core.wins_ties = options.self.name < peer.id.name;
  core.can_connect = !peer.addresses.empty();
  core.window_bytes = options.window_bytes;
  core.queue_bytes = options.queue_bytes;
  core.reconnect_limit = options.reconnect_limit;
  core.stall_limit = options.stall_limit;
  core.greeting_limit = std::min(core.greeting_limit, options.stall_limit);
  return core;
}

SessionCore::Failure FailureOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kInvalidArgument:
      return SessionCore::Failure::kFatal;
    case absl::StatusCode::kUnavailable:
      return transport::IsRefused(status) ? SessionCore::Failure::kRefused : SessionCore::Failure::kTransient;
    case absl::StatusCode::kCancelled:  // Our own endpoint is closed,
    case absl::StatusCode::kInternal:   // or broken.
      return SessionCore::Failure::kFatal;
    default:
      return SessionCore::Failure::kTransient;
  }
}

// For its calls: who is not there any more is unavailable, whoever has its address now.
absl::Status AsDeath(const absl::Status& status) {
  return absl::IsNotFound(status) ? transport::RefusedError(status.message()) : status;
}

}  // namespace

Session::Session(std::shared_ptr<Hub> hub, Peer peer)
    : hub_(std::move(hub)),
      peer_(std::move(peer)),
      core_(CoreOptions(hub_->options(), peer_)),
      served_(hub_->options().max_calls_served),
      backlog_(std::make_shared<Backlog>()) {}

// Pipes.

Session::PipePtr Session::AddPipe(std::shared_ptr<transport::Pipe> pipe) {
  auto state = std::make_shared<PipeState>();
  state->id = next_pipe_++;
  state->lane = pipe->peer().lane;
  state->initiated = pipe->peer().initiated;
  state->pipe = std::move(pipe);
  pipes_.emplace(state->id, state);
  return state;
}

void Session::OnAccepted(std::shared_ptr<transport::Pipe> pipe) {
  PipePtr state;
  absl::Status refused;
  {
    absl::MutexLock lock(&mu_);
    int ungreeted = 0;
    for (const auto& [id, other] : pipes_) ungreeted += !other->initiated && !other->greeted.load();
    if (core_.dead()) {
      refused = absl::UnavailableError("the session of this incarnation has ended");
    } else if (ungreeted >= kMaxUngreeted) {
      refused = absl::ResourceExhaustedError("too many of its pipes have said nothing yet");
    } else {
      state = AddPipe(pipe);
    }
  }
  if (state == nullptr) return pipe->Close(refused);
  hub_->At(hub_->Now() + kGreetingLimit, [weak = weak_from_this(), weak_pipe = std::weak_ptr(state)] {
    auto self = weak.lock();
    PipePtr late = weak_pipe.lock();
    if (self == nullptr || late == nullptr || late->greeted.load()) return;
    self->PipeClosed(late, absl::DeadlineExceededError("it opened a pipe and said nothing"));
  });
  StartRead(state);
}

void Session::Connect(Lane lane, uint64_t attempt) {
  Peer peer = this->peer();
  hub_->endpoint()->Connect(
      peer.addresses, peer.id, lane, std::min(kConnectLimit, hub_->options().reconnect_limit),
      [self = shared_from_this(), lane, attempt](absl::StatusOr<std::shared_ptr<transport::Pipe>> pipe) {
        PipePtr state;
        {
          absl::MutexLock lock(&self->mu_);
          if (pipe.ok()) {
            const base::MemberId& proven = (*pipe)->peer().member;
            if (self->peer_.id.incarnation == base::Incarnation())
              self->peer_.id.incarnation = proven.incarnation;
            state = self->AddPipe(*std::move(pipe));
            self->core_.OnConnected(lane, attempt, state->id, self->hub_->Now());
          } else {
            self->core_.OnConnectFailed(lane, attempt, FailureOf(pipe.status()), AsDeath(pipe.status()),
                                        self->hub_->Now());
          }
        }
        self->Drain();
        if (state != nullptr) self->StartRead(state);
      });
}

void Session::PipeClosed(const PipePtr& pipe, const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    if (pipe->closed) return;
    pipe->closed = true;
    pipes_.erase(pipe->id);
    if (core_.pipe(pipe->lane) == pipe->id) {
      ATOLL_LOG(kInfo) << "pipe to " << peer_.id.ToString() << " at " << pipe->pipe->peer().address
                       << " ended: " << status.message();
    }
    core_.OnPipeClosed(pipe->id, status, hub_->Now());
  }
  pipe->pipe->Close(status);
  Drain();
}

// The end.

void Session::Finish(const absl::Status& reason) {
  std::vector<std::unique_ptr<PendingCall>> calls;
  std::vector<PipePtr> pipes;
  base::MemberId id;
  std::string where;
  bool notify = false;
  bool quiet = false;
  std::vector<std::stop_source> given_up;
  std::array<Landing, 2> over;  // What half came: let go of without the lock.
  {
    absl::MutexLock lock(&mu_);
    for (size_t lane = 0; lane < over.size(); ++lane) {
      over[lane].tensors.swap(landings_[lane].tensors);
      over[lane].wait.swap(landings_[lane].wait);
      std::swap(over[lane].streams, landings_[lane].streams);
    }
    calls = calls_.TakeAll();
    given_up = served_.CancelAll();
    for (auto& [pipe_id, pipe] : pipes_) pipes.push_back(pipe);
    id = peer_.id;
    notify = notify_;
    where = AddressText();
    quiet = quiet_;
  }
  if (quiet) {
    ATOLL_LOG(kInfo) << "peer " << id.ToString() << " at " << where << ": " << reason.message();
  } else {
    ATOLL_LOG(kWarning) << "peer " << id.ToString() << " at " << where << " is gone: " << reason.message()
                        << "; calls_in_flight=" << calls.size();
  }
  for (const PipePtr& pipe : pipes) PipeClosed(pipe, reason);
  for (std::stop_source& stop : given_up) stop.request_stop();
  // While the requests that were dropped are still there: whether they were sent.
  std::vector<std::pair<std::unique_ptr<ClientCall>, base::Ran>> ended;
  for (std::unique_ptr<PendingCall>& call : calls) {
    base::Ran ran = RanUnanswered(*call);
    ended.emplace_back(static_cast<ClientCall*>(call.release()), ran);
  }
  hub_->ScheduleFailure([self = shared_from_this(), ended = std::move(ended), reason, notify, id]() mutable {
    for (auto& [call, ran] : ended) self->Fail(std::move(call), reason, ran);
    if (notify) self->hub_->NotifyDead(id, reason);
  });
}

// The one that replies land from.
std::shared_ptr<transport::Pipe> Session::BulkPipe() const {
  auto found = pipes_.find(core_.pipe(Lane::kBulk));
  return found == pipes_.end() ? nullptr : found->second->pipe;
}

void Session::OnTimer(absl::Time when) {
  std::vector<std::unique_ptr<PendingCall>> expired;
  std::shared_ptr<transport::Pipe> cut;
  {
    absl::MutexLock lock(&mu_);
    timers_.erase(when);
    absl::Time now = hub_->Now();
    core_.OnTimer(now);
    CallTable::Expired due = calls_.TakeExpired(now);
    expired = std::move(due.calls);
    if (due.landing) cut = BulkPipe();
  }
  // A reply is landing in memory that its caller gets back now: only the end of the pipe stops that.
  if (cut != nullptr)
    cut->Close(absl::DeadlineExceededError("the deadline of a call whose reply was on its way"));
  End(std::move(expired), absl::OkStatus());
  Drain();
}

Destination Session::DestinationOf(bool reply) const {
  absl::MutexLock lock(&mu_);
  if (reply) return {reply_map_, peer_.id, true};
  const auto& maps = hub_->options().device_maps;
  auto found = maps.find(peer_.id.name);
  return {found == maps.end() ? DeviceMap() : found->second, peer_.id, false};
}

// State.

std::string Session::AddressText() const {
  if (!address_.empty()) return address_;
  if (peer_.addresses.empty()) return "an unknown address";
  return absl::StrJoin(peer_.addresses, ",");
}

absl::Status Session::Explain(const absl::Status& status, const MethodId& method, base::Ran ran) const {
  std::string text;
  {
    absl::MutexLock lock(&mu_);
    text = absl::StrCat("calling ", MethodText(method.name, method.version), " on ", peer_.id.ToString(),
                        " at ", AddressText(), ": ", status.message(), " (ran: ", base::RanName(ran), ")");
  }
  return base::WithRan(absl::Status(status.code(), text), ran);
}

void Session::Update(const Peer& peer) {
  {
    absl::MutexLock lock(&mu_);
    if (peer_.id.incarnation == base::Incarnation()) peer_.id.incarnation = peer.id.incarnation;
    if (peer.addresses.empty() || core_.dead()) return;
    bool first = peer_.addresses.empty();
    peer_.addresses = peer.addresses;
    if (first) core_.SetCanConnect(hub_->Now());
  }
  Drain();
}

void Session::Probe() {
  {
    absl::MutexLock lock(&mu_);
    core_.Probe(hub_->Now());
  }
  Drain();
}

Peer Session::peer() const {
  absl::MutexLock lock(&mu_);
  return peer_;
}

bool Session::dead() const {
  absl::MutexLock lock(&mu_);
  return core_.dead();
}

absl::Time Session::LastHeard(base::Incarnation incarnation) const {
  absl::MutexLock lock(&mu_);
  return peer_.id.incarnation == incarnation ? heard_ : absl::InfinitePast();
}

void Session::Die(absl::Status reason, bool notify, bool quiet) {
  {
    absl::MutexLock lock(&mu_);
    if (core_.dead()) return;
    notify_ = notify;
    quiet_ = quiet;
    core_.Die(std::move(reason));
  }
  Drain();
}

void Session::SayBye() {
  {
    absl::MutexLock lock(&mu_);
    core_.SayBye();
  }
  Drain();
}

bool Session::Drained() const { return core_.drained() && calls_.one_way_count() == 0; }

bool Session::AwaitDrained(absl::Duration limit) const {
  // A passer-by that told no address and went is not waited for: whoever has the key could hold us up.
  auto drained = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return core_.dead() || Drained() || !core_.reachable();
  };
  absl::MutexLock lock(&mu_);
  return base::AwaitFor(mu_, absl::Condition(&drained), limit);
}

bool Session::AwaitClosed(absl::Duration limit) const {
  auto closed = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return pipes_.empty(); };
  absl::MutexLock lock(&mu_);
  return base::AwaitFor(mu_, absl::Condition(&closed), limit);
}

std::string Session::Leftover() const {
  absl::MutexLock lock(&mu_);
  if (core_.dead() || Drained()) return "";
  return absl::StrCat(peer_.id.ToString(), ": ", core_.unacked_count(), " messages not acknowledged, ",
                      core_.queued_count(), " not sent, ", calls_.one_way_count(),
                      " one-way calls not taken");
}

}  // namespace Atoll::rpc
