#include "atoll/rpc/membership_client.h"

#include <algorithm>
#include <functional>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/clock.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/base/words.h"
#include "atoll/rpc/user_code.h"
#include "atoll/transport/refusal.h"

namespace Atoll::rpc {
namespace {

using cluster::Describe;
using Kind = MembershipEvent::Kind;

constexpr absl::Duration kPollTimeout = absl::Seconds(60);  // Three times what the coordinator holds it.
constexpr absl::Duration kFarewell = absl::Seconds(1);
constexpr absl::string_view kObserver = "an observer of the membership";
constexpr absl::Duration kLongest = absl::Hours(24 * 365);
constexpr size_t kMostGone = 1024;  // Of whom it is remembered why.

std::string JoinNames(const std::vector<MemberInfo>& members) {
  return absl::StrJoin(members, ", ",
                       [](std::string* out, const MemberInfo& one) { out->append(Describe(one)); });
}

/// The coordinator itself said that we are no member (it is not that it could not be asked).
bool SaysGone(const absl::Status& status) {
  return base::GetRan(status) == base::Ran::kYes &&
         (absl::IsFailedPrecondition(status) || absl::IsNotFound(status));
}

}  // namespace

MembershipClient::MembershipClient(Agent* agent, MembershipOptions options, base::MemberId coordinator,
                                   std::shared_ptr<MembershipService> service)
    : agent_(agent),
      options_(std::move(options)),
      coordinator_(std::move(coordinator)),
      service_(std::move(service)),
      observers_run_(base::SerialExecutor::Create(agent->pool())),
      self_{agent->self(), options_.rank, options_.role, agent->addresses()} {}

absl::Status MembershipClient::ServePing(Agent* agent) {
  absl::Status status =
      agent->Register({kPingMethod}, [](ServerCall call) { std::move(call.responder).Reply(Payload()); });
  // Since a join that failed: the next one may do better.
  return absl::IsAlreadyExists(status) ? absl::OkStatus() : status;
}

absl::Status MembershipClient::Start(JoinReply reply) {
  absl::Status first =
      agent_->Register({kMemberMethod}, [](ServerCall call) { std::move(call.responder).Reply(Payload()); });
  if (absl::IsAlreadyExists(first)) {
    return absl::AlreadyExistsError(absl::StrCat(agent_->self().ToString(), " has a membership already"));
  }
  ATOLL_RETURN_IF_ERROR(first);
  lease_ = reply.lease;
  for (const MemberInfo& member : reply.members) {
    if (member.id == self_.id) self_.rank = member.rank;
  }
  if (self_.rank == kAnyRank) return absl::InternalError("the coordinator gave us no rank");
  for (const MemberInfo& member : reply.members) {
    if (member.id == self_.id) continue;
    Peer peer{member.id, member.addresses};
    // Where we reached it counts too: what it says of itself may mean nothing here, behind a port that is mapped
    // or as a link-local address.
    if (const auto met = agent_->FindPeer(peer.id.name); met.has_value() && met->id == peer.id) {
      for (const std::string& address : met->addresses) {
        if (std::count(peer.addresses.begin(), peer.addresses.end(), address) == 0) {
          peer.addresses.push_back(address);
        }
      }
    }
    agent_->AddPeer(std::move(peer));
  }
  {
    absl::MutexLock lock(&mu_);
    for (MemberInfo& member : reply.members) members_.emplace(member.rank, std::move(member));
    came_and_left_.insert(reply.left.begin(), reply.left.end());
    seen_ = reply.event;
    confirmed_ = last_beat_ = woken_ = agent_->clock()->Now();
  }
  agent_->OnPeerDead([weak = weak_from_this()](const base::MemberId& id, absl::Status reason) {
    if (auto self = weak.lock()) self->OnPeerDead(id, reason);
  });
  Poll();
  if (!is_coordinator()) Beat();
  return absl::OkStatus();
}

Agent* MembershipClient::agent() const {
  absl::MutexLock lock(&mu_);
  return running() ? agent_ : nullptr;
}

bool MembershipClient::leaving() const {
  absl::MutexLock lock(&mu_);
  return leaving_;
}

// Events.

void MembershipClient::Poll() {
  Agent* agent = this->agent();
  if (agent == nullptr) return;
  Payload request;
  {
    absl::MutexLock lock(&mu_);
    request.body = EncodeSeen(seen_);
  }
  CallOptions options;
  options.timeout = kPollTimeout;
  agent->Call(
      coordinator_.name, {kEventMethod}, std::move(request), std::move(options),
      [self = shared_from_this()](absl::StatusOr<Received> reply) { self->OnEvents(std::move(reply)); });
}

void MembershipClient::OnEvents(absl::StatusOr<Received> reply) {
  absl::Status status = reply.status();
  if (status.ok()) {
    absl::StatusOr<std::vector<MembershipEvent>> events = DecodeEvents(reply->body);
    status = events.status();
    if (events.ok()) {
      for (const MembershipEvent& event : *events) {
        if (!Apply(event)) return;
      }
    }
  }
  if (status.ok() || absl::IsDeadlineExceeded(status)) return Poll();
  Agent* agent = this->agent();
  if (agent == nullptr || leaving()) return;
  if (SaysGone(status) || absl::IsInvalidArgument(status)) return Fail(std::move(status));
  if (!agent->FindPeer(coordinator_.name).has_value()) {
    return Fail(base::Annotate(status, "the coordinator is lost"));
  }
  // It could not be asked this time: queues are full, or it shuts down.
  agent->timer()->At(agent->clock()->Now() + lease_ / 8, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->Poll();
  });
}

bool MembershipClient::Apply(const MembershipEvent& event) {
  const MemberInfo& member = event.member;
  Agent* agent = nullptr;
  bool own = member.id == self_.id;
  {
    absl::MutexLock lock(&mu_);
    if (!running()) return false;
    if (event.number <= seen_) return true;
    if (event.number == seen_ + 1) agent = agent_;
    seen_ = event.number;
    if (event.kind != Kind::kJoined) {
      members_.erase(member.rank);
      const bool counts = options_.world_size != kOpenWorld;
      if (counts && event.kind == Kind::kLeft && event.reason.ok()) came_and_left_.insert(member.rank);
      gone_.emplace_back(member, event.reason.ok() ? absl::StrCat(Describe(member), " has left")
                                                   : std::string(event.reason.message()));
      if (gone_.size() > kMostGone) gone_.pop_front();
    }
  }
  if (agent == nullptr) {
    Fail(absl::DataLossError("an event of the membership was lost"));
    return false;
  }
  if (event.kind == Kind::kJoined) {
    if (!own) agent->AddPeer({member.id, member.addresses});
    {
      // Only now: who waits until all are there calls them at once.
      absl::MutexLock lock(&mu_);
      members_[member.rank] = member;
      came_and_left_.erase(member.rank);
    }
    ATOLL_LOG(kInfo) << Describe(member) << " joined";
  } else if (member.id == coordinator_ && !is_coordinator()) {
    Fail(absl::UnavailableError(absl::StrCat("the coordinator ", Describe(member), " has left the job")));
    return false;
  } else {
    RemovePeer(agent, event);
    ATOLL_LOG(kInfo) << (event.reason.ok() ? absl::StrCat(Describe(member), " left")
                                           : event.reason.message());
  }
  if (!own) Announce(event);
  return true;
}

void MembershipClient::RemovePeer(Agent* agent, const MembershipEvent& event) {
  if (!is_coordinator() || event.kind != Kind::kLeft) return agent->RemovePeer(event.member.id, event.reason);
  // The answer to who leaves may be on its way: the end of the session would destroy it.
  agent->timer()->At(agent->clock()->Now() + kFarewell, [weak = weak_from_this(), event] {
    auto self = weak.lock();
    if (self == nullptr) return;
    if (Agent* agent = self->agent()) agent->RemovePeer(event.member.id, event.reason);
  });
}

void MembershipClient::Announce(MembershipEvent event) {
  std::vector<std::function<void(const MembershipEvent&)>> observers;
  {
    absl::MutexLock lock(&mu_);
    observers = event_observers_;
  }
  if (observers.empty()) return;
  observers_run_->Schedule([observers = std::move(observers), event = std::move(event)] {
    for (const auto& observer : observers) RunCallback(kObserver, std::cref(observer), event);
  });
}

void MembershipClient::OnEvent(std::function<void(const MembershipEvent&)> observer) {
  absl::MutexLock lock(&mu_);
  event_observers_.push_back(std::move(observer));
}

void MembershipClient::OnError(std::function<void(absl::Status)> observer) {
  absl::Status error;
  {
    absl::MutexLock lock(&mu_);
    error = error_;
    if (error.ok()) return error_observers_.push_back(std::move(observer));
  }
  observers_run_->Schedule([observer = std::move(observer), error]() mutable {
    RunCallback(kObserver, std::move(observer), error);
  });
}

// Life and death.

void MembershipClient::Beat() {
  absl::Duration beat = lease_ / 4;
  absl::Time now = agent_->clock()->Now();
  absl::Duration silence;
  bool lost = false;
  {
    absl::MutexLock lock(&mu_);
    if (!running()) return;
    if (now - last_beat_ > lease_ / 2) woken_ = now;
    last_beat_ = now;
    silence = now - confirmed_;
    // After it was stopped, answers may still be in the queues.
    lost = silence > 2 * lease_ && now - woken_ > lease_ / 2;
  }
  if (lost) {
    return Fail(
        absl::UnavailableError(absl::StrCat("the coordinator ", coordinator_.ToString(),
                                            " confirmed no heartbeat for ", base::DurationText(silence),
                                            ", longer than twice the lease: it is lost, or this process was "
                                            "stopped or cut off and was declared dead")));
  }
  CallOptions options;
  options.timeout = lease_;
  options.reply_inline = true;
  agent_->Call(coordinator_.name, {kHeartbeatMethod}, Payload(), std::move(options),
               [self = shared_from_this(), now](absl::StatusOr<Received> reply) {
                 self->OnBeat(now, reply.status());
               });
  // Not from the answer: the timer's thread runs whatever user code does.
  agent_->timer()->At(now + beat, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->Beat();
  });
}

void MembershipClient::OnBeat(absl::Time sent, const absl::Status& status) {
  if (SaysGone(status) && !leaving()) return Fail(status);
  if (!status.ok()) return;  // Beat sees how long that lasts.
  absl::MutexLock lock(&mu_);
  confirmed_ = std::max(confirmed_, sent);
}

void MembershipClient::OnPeerDead(const base::MemberId& id, const absl::Status& reason) {
  Agent* agent = this->agent();
  if (agent == nullptr) return;
  if (is_coordinator()) return service_->ReportDead(id, std::string(reason.message()));
  if (id == coordinator_) {
    return Fail(
        absl::UnavailableError(absl::StrCat("the coordinator ", id.ToString(), " died: ", reason.message())));
  }
  const bool seen = transport::IsRefused(reason);
  DeathReport report;
  report.suspect = id;
  report.evidence =
      seen ? cluster::MembershipCore::Evidence::kSeen : cluster::MembershipCore::Evidence::kUnreachable;
  report.what = std::string(reason.message());
  Payload request;
  request.body = Encode(report);
  agent->Call(coordinator_.name, {kReportMethod}, std::move(request), {}, [](absl::StatusOr<Received>) {});
}

void MembershipClient::Fail(absl::Status error) {
  std::map<uint64_t, base::Promise<Values>> gathers;
  std::vector<std::function<void(absl::Status)>> observers;
  MemberInfo coordinator;
  {
    absl::MutexLock lock(&mu_);
    if (!running()) return;
    error_ = error;
    gathers.swap(gathers_);
    observers.swap(error_observers_);
    for (const auto& [rank, member] : members_) {
      if (member.id == coordinator_) coordinator = member;
    }
  }
  ATOLL_LOG(kError) << "no longer a member: " << error.message();
  agent_->RemovePeer(coordinator_, error);
  for (auto& [id, promise] : gathers) promise.SetOn(agent_->pool(), error);
  MembershipEvent event;
  event.kind = Kind::kDead;
  event.member = std::move(coordinator);
  event.reason = error;
  if (!event.member.id.name.empty()) Announce(std::move(event));
  observers_run_->Schedule([observers = std::move(observers), error] {
    for (const auto& observer : observers) RunCallback(kObserver, std::cref(observer), error);
  });
}

absl::Status MembershipClient::NotRunning() const {
  if (!error_.ok()) return error_;
  return left_ ? absl::FailedPreconditionError("this process has left the job") : absl::OkStatus();
}

absl::StatusOr<MemberInfo> MembershipClient::Find(base::Rank rank) const {
  std::string otherwise = "nobody of that rank is there";
  const int world = options_.world_size;
  if (rank.value() < 0 || (world != kOpenWorld && rank.value() >= world)) {
    otherwise =
        world == kOpenWorld ? "ranks start at 0" : absl::StrCat("the job's ranks are 0 to ", world - 1);
  } else if (absl::MutexLock lock(&mu_); came_and_left_.count(rank) > 0) {
    otherwise = "whoever had it has left";
  }
  return FindIf([rank](const MemberInfo& member) { return member.rank == rank; },
                absl::StrCat("rank ", rank.value()), otherwise);
}

absl::StatusOr<MemberInfo> MembershipClient::Find(absl::string_view name) const {
  return FindIf([name](const MemberInfo& member) { return member.id.name == name; },
                absl::StrCat("the name '", absl::CHexEscape(name.substr(0, base::kMaxMemberNameBytes)), "'"),
                "nobody of that name is there");
}

absl::StatusOr<MemberInfo> MembershipClient::FindIf(const std::function<bool(const MemberInfo&)>& fits,
                                                    absl::string_view what,
                                                    absl::string_view otherwise) const {
  absl::MutexLock lock(&mu_);
  ATOLL_RETURN_IF_ERROR(NotRunning());
  for (const auto& [rank, member] : members_) {
    if (fits(member)) return member;
  }
  for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
    if (fits(gone->first)) otherwise = gone->second;
    if (fits(gone->first)) break;
  }
  return absl::NotFoundError(absl::StrCat(Describe(self_), " knows no member of ", what, ": ", otherwise));
}

absl::Status MembershipClient::status() const {
  absl::MutexLock lock(&mu_);
  return error_;
}

std::vector<MemberInfo> MembershipClient::Members() const {
  absl::MutexLock lock(&mu_);
  std::vector<MemberInfo> members;
  for (const auto& [rank, member] : members_) members.push_back(member);
  return members;
}

// What waits.

absl::Status MembershipClient::Await(size_t count, bool or_left, absl::Duration limit) {
  base::ThreadPool::BlockingScope blocking;
  if (!blocking.ok()) return absl::ResourceExhaustedError("every thread of the pool waits");
  absl::MutexLock lock(&mu_);
  auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    const size_t here = members_.size() + (or_left ? came_and_left_.size() : 0);
    return !running() || here >= count;
  };
  const bool there = base::AwaitFor(mu_, absl::Condition(&over), limit);
  ATOLL_RETURN_IF_ERROR(NotRunning());
  return there ? absl::OkStatus() : absl::DeadlineExceededError("");
}

absl::Status MembershipClient::WaitForCount(int count, absl::Duration limit) {
  if (count < 1 || (options_.world_size != kOpenWorld && count > options_.world_size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "waiting for ", count, " members: it should be at least 1",
        options_.world_size == kOpenWorld ? ""
                                          : absl::StrCat(", and at most the world's ", options_.world_size)));
  }
  absl::Status status = Await(static_cast<size_t>(count), /*or_left=*/false, limit);
  if (!absl::IsDeadlineExceeded(status)) return status;
  const std::vector<MemberInfo> members = Members();
  return absl::DeadlineExceededError(absl::StrCat("fewer than ", count, " members came within ",
                                                  base::DurationText(limit), ": there are ", members.size(),
                                                  ", ", JoinNames(members)));
}

absl::Status MembershipClient::WaitForAll(absl::Duration limit) {
  if (options_.world_size == kOpenWorld) {
    return absl::InvalidArgumentError("an open world is never complete: WaitForCount waits for some");
  }
  absl::Status status = Await(static_cast<size_t>(options_.world_size), /*or_left=*/true, limit);
  if (!absl::IsDeadlineExceeded(status)) return status;
  absl::MutexLock lock(&mu_);
  std::vector<int> missing;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    const base::Rank one(rank);
    if (members_.count(one) == 0 && came_and_left_.count(one) == 0) missing.push_back(rank);
  }
  return absl::DeadlineExceededError(absl::StrCat(missing.size(), " of ", options_.world_size,
                                                  " ranks did not come within ", base::DurationText(limit),
                                                  ": ", absl::StrJoin(missing, ", ")));
}

absl::StatusOr<MembershipClient::Values> MembershipClient::AllGather(absl::string_view name,
                                                                     std::string value, absl::Duration limit,
                                                                     std::vector<std::string> participants) {
  limit = std::min(std::max(limit, absl::ZeroDuration()), kLongest);
  base::Promise<Values> promise;
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mu_);
    ATOLL_RETURN_IF_ERROR(NotRunning());
    id = next_gather_++;
    gathers_.emplace(id, promise);
  }
  Payload request;
  request.body = Encode(GatherRequest{std::string(name), std::move(participants), std::move(value), limit});
  CallOptions options;
  options.timeout = limit + lease_;  // The coordinator ends it in time, and says who is missing.
  agent_->Call(coordinator_.name, {kGatherMethod}, std::move(request), std::move(options),
               [promise](absl::StatusOr<Received> reply) {
                 promise.Set(reply.ok() ? DecodeGathered(*reply) : absl::StatusOr<Values>(reply.status()));
               });
  absl::StatusOr<Values> result = promise.future().Wait(limit + 2 * lease_);
  absl::MutexLock lock(&mu_);
  gathers_.erase(id);
  // The call that died with the coordinator's peer may be told before we are.
  if (!result.ok() && !error_.ok()) return error_;
  return result;
}

absl::Status MembershipClient::AwaitOthersGone(absl::Duration limit) {
  absl::MutexLock lock(&mu_);
  auto alone = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !running() || members_.size() == 1; };
  if (base::AwaitFor(mu_, absl::Condition(&alone), limit)) return absl::OkStatus();
  std::vector<MemberInfo> there;
  for (const auto& [rank, member] : members_) {
    if (member.id != self_.id) there.push_back(member);
  }
  return absl::DeadlineExceededError(
      absl::StrCat("still in the job after ", base::DurationText(limit), ": ", JoinNames(there)));
}

absl::Status MembershipClient::Leave(absl::Duration limit, const absl::Status& why) {
  base::ThreadPool::BlockingScope blocking;
  if (agent() == nullptr) return status();
  absl::Status status;
  if (is_coordinator()) {
    status = AwaitOthersGone(limit);
    limit = absl::Seconds(1);
  }
  {
    absl::MutexLock lock(&mu_);
    leaving_ = true;
  }
  CallOptions options;
  options.timeout = limit;
  Payload farewell;
  farewell.body = EncodeWhy(why.ok() ? "" : base::ErrorText(why));
  absl::StatusOr<Received> left =
      agent_->Call(coordinator_.name, {kLeaveMethod}, std::move(farewell), std::move(options))
          .Wait(limit + lease_);
  if (status.ok()) status = left.status();
  Stop();
  return status;
}

void MembershipClient::Stop() {
  std::map<uint64_t, base::Promise<Values>> gathers;
  {
    absl::MutexLock lock(&mu_);
    if (left_) return;
    left_ = true;
    gathers.swap(gathers_);
  }
  absl::Status reason = absl::UnavailableError("the coordinator has left the job");
  if (is_coordinator()) service_->Close(reason);
  reason = absl::CancelledError("this process has left the job");
  for (auto& [id, promise] : gathers) promise.SetOn(agent_->pool(), reason);
}

}  // namespace Atoll::rpc
