#include "atoll/rpc/membership_service.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/rpc/membership_messages.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::rpc {
namespace {

static_assert(cluster::MembershipCore::kMaxAddresses == transport::kMaxAddresses);

constexpr absl::Duration kProbeLimit = absl::Seconds(2);
constexpr absl::Duration kAnswerTime = absl::Seconds(1);

/// When a call of `deadline` is to be answered, so that its caller hears who is in its way.
absl::Time InTime(absl::Time deadline, absl::Time now) {
  return deadline - std::min(std::max(deadline - now, absl::ZeroDuration()) / 10, kAnswerTime);
}

}  // namespace

MembershipService::MembershipService(Agent* agent, Core::Options options, cluster::Member self)
    : agent_(agent), options_(options), core_(options, std::move(self), agent->clock()->Now()) {}

absl::StatusOr<std::shared_ptr<MembershipService>> MembershipService::Start(Agent* agent,
                                                                            Core::Options options,
                                                                            cluster::Member self) {
  std::shared_ptr<MembershipService> service(new MembershipService(agent, options, std::move(self)));
  ATOLL_RETURN_IF_ERROR(service->Register());
  service->Arm();
  return service;
}

absl::Status MembershipService::Register() {
  using Self = MembershipService;
  auto bind = [this](void (Self::*method)(ServerCall)) {
    return [self = shared_from_this(), method](ServerCall call) { (self.get()->*method)(std::move(call)); };
  };
  // Joining comes last: who finds it finds all.
  ATOLL_RETURN_IF_ERROR(Serve(kHeartbeatMethod, bind(&Self::OnHeartbeat)));
  ATOLL_RETURN_IF_ERROR(Serve(kEventMethod, bind(&Self::OnPoll)));
  ATOLL_RETURN_IF_ERROR(Serve(kReportMethod, bind(&Self::OnReport)));
  ATOLL_RETURN_IF_ERROR(Serve(kGatherMethod, bind(&Self::OnGather)));
  ATOLL_RETURN_IF_ERROR(Serve(kLeaveMethod, bind(&Self::OnLeave)));
  return Serve(kJoinMethod, bind(&Self::OnJoin));
}

absl::Status MembershipService::Serve(const char* method, std::function<void(ServerCall)> handler) {
  MethodOptions options;
  options.executor = &inline_;  // Lives as long as the handler, which holds us.
  return agent_->Register({method}, std::move(handler), options);
}

void MembershipService::OnJoin(ServerCall call) {
  absl::StatusOr<JoinRequest> request = DecodeJoinRequest(call.request.body);
  if (request.ok() && request->world_size != options_.world_size) {
    auto of = [](int world_size) {
      return world_size == cluster::kOpenWorld ? std::string("open") : absl::StrCat(world_size);
    };
    request = absl::InvalidArgumentError(absl::StrCat(call.caller.ToString(), " comes with a world size of ",
                                                      of(request->world_size), ", the job's is ",
                                                      of(options_.world_size)));
  }
  if (!request.ok()) return std::move(call.responder).Reply(request.status());
  cluster::Member member{call.caller, request->rank, request->role, request->addresses};
  Put(
      std::move(call.responder),
      [&](Core& core, Core::Token token, absl::Time now) {
        return core.Join(std::move(member), token, InTime(call.deadline, now), now);
      },
      std::move(call.cancelled));
}

void MembershipService::OnHeartbeat(ServerCall call) {
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    status = closed_.ok() ? core_.Heartbeat(call.caller, agent_->clock()->Now()) : closed_;
  }
  if (!status.ok()) return std::move(call.responder).Reply(std::move(status));
  std::move(call.responder).Reply(Payload());
}

void MembershipService::OnPoll(ServerCall call) {
  absl::StatusOr<uint64_t> seen = DecodeSeen(call.request.body);
  if (!seen.ok()) return std::move(call.responder).Reply(seen.status());
  Put(std::move(call.responder), [&](Core& core, Core::Token token, absl::Time now) {
    return core.Poll(call.caller, *seen, token, now);
  });
}

void MembershipService::OnReport(ServerCall call) {
  absl::StatusOr<DeathReport> report = DecodeReport(call.request.body);
  if (!report.ok()) return std::move(call.responder).Reply(report.status());
  Tell([&](Core& core, Core::Token, absl::Time now) {
    return core.ReportDead(call.caller, report->suspect, report->evidence, report->what, now);
  });
  std::move(call.responder).Reply(Payload());
}

void MembershipService::OnGather(ServerCall call) {
  absl::StatusOr<GatherRequest> request = DecodeGatherRequest(call.request.body);
  if (!request.ok()) return std::move(call.responder).Reply(request.status());
  Put(std::move(call.responder), [&](Core& core, Core::Token token, absl::Time now) {
    return core.Gather(call.caller, std::move(request->name), std::move(request->participants),
                       std::move(request->value), request->limit, token, now);
  });
}

void MembershipService::OnLeave(ServerCall call) {
  absl::StatusOr<std::string> why = DecodeWhy(call.request.body);
  if (!why.ok()) return std::move(call.responder).Reply(why.status());
  Tell([&](Core& core, Core::Token, absl::Time now) { return core.Leave(call.caller, now, *why); });
  std::move(call.responder).Reply(Payload());
}

void MembershipService::ReportDead(const base::MemberId& id, const std::string& what) {
  Tell([&](Core& core, Core::Token, absl::Time now) {
    return core.ReportDead(agent_->self(), id, Core::Evidence::kSeen, what, now);
  });
}

MembershipService::Core::Actions MembershipService::Decide(const Ask& ask, Core::Token token) {
  Core::Actions actions;
  auto append = [&](Core::Actions more) { std::move(more.begin(), more.end(), std::back_inserter(actions)); };
  for (const auto& [join, cancelled] : joins_) {
    if (cancelled()) append(core_.WithdrawJoin(join));
  }
  append(ask(core_, token, agent_->clock()->Now()));
  return actions;
}

void MembershipService::Put(Responder responder, const Ask& ask, std::function<bool()> cancelled) {
  Core::Actions actions;
  absl::Status closed;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    if (closed.ok()) {
      Core::Token token = next_token_++;
      waiting_.emplace(token, std::move(responder));
      if (cancelled != nullptr) joins_.emplace(token, std::move(cancelled));
      actions = Decide(ask, token);
    }
  }
  if (!closed.ok()) return std::move(responder).Reply(closed);
  Run(std::move(actions));
}

void MembershipService::Tell(const Ask& ask) {
  Core::Actions actions;
  {
    absl::MutexLock lock(&mu_);
    if (!closed_.ok()) return;
    actions = Decide(ask, 0);
  }
  Run(std::move(actions));
}

void MembershipService::Run(Core::Actions actions) {
  for (Core::Action& action : actions) {
    std::visit([this](auto& one) { Do(std::move(one)); }, action);
  }
  Arm();
}

void MembershipService::Do(Core::JoinAnswer answer) {
  if (!answer.status.ok()) return Answer(answer.token, answer.status);
  Payload payload;
  payload.body =
      Encode(JoinReply{options_.lease, answer.event, std::move(answer.members), std::move(answer.left)});
  Answer(answer.token, std::move(payload));
}

void MembershipService::Do(Core::PollAnswer answer) {
  if (!answer.status.ok()) return Answer(answer.token, answer.status);
  Payload payload;
  payload.body = Encode(answer.events);
  Answer(answer.token, std::move(payload));
}

void MembershipService::Do(const Core::GatherAnswer& answer) {
  if (!answer.status.ok()) return Answer(answer.token, answer.status);
  Answer(answer.token, EncodeGathered(*answer.values));
}

void MembershipService::Do(const Core::Probe& probe) {
  CallOptions options;
  options.timeout = std::min(kProbeLimit, options_.lease / 2);
  options.reply_inline = true;
  auto on_reply = [self = shared_from_this(), suspect = probe.suspect](absl::StatusOr<Received> reply) {
    Core::ProbeResult result = reply.ok() ? Core::ProbeResult::kAlive : Core::ProbeResult::kNoAnswer;
    if (absl::IsUnavailable(reply.status())) result = Core::ProbeResult::kDead;
    self->Tell([&](Core& core, Core::Token, absl::Time now) {
      return core.Probed(suspect, result, std::string(reply.status().message()), now);
    });
  };
  agent_->Call(probe.suspect.name, {kPingMethod}, Payload(), std::move(options), std::move(on_reply));
}

void MembershipService::Answer(Core::Token token, absl::StatusOr<Payload> reply) {
  Responder responder;
  {
    absl::MutexLock lock(&mu_);
    auto found = waiting_.find(token);
    if (found == waiting_.end()) return;  // Closed meanwhile.
    responder = std::move(found->second);
    waiting_.erase(found);
    joins_.erase(token);
  }
  std::move(responder).Reply(std::move(reply));
}

void MembershipService::Arm() {
  absl::MutexLock lock(&mu_);
  absl::Time when = core_.NextTick();
  if (!closed_.ok() || when >= armed_) return;
  if (timer_ != 0) agent_->timer()->Cancel(timer_);
  armed_ = when;
  timer_ = agent_->timer()->At(when, [weak = weak_from_this()] {
    if (auto self = weak.lock()) self->OnTimer();
  });
}

void MembershipService::OnTimer() {
  std::vector<base::MemberId> late;
  {
    absl::MutexLock lock(&mu_);
    if (!closed_.ok()) return;
    armed_ = absl::InfiniteFuture();
    timer_ = 0;
    late = core_.Late(agent_->clock()->Now() + options_.lease / 4);
  }
  // Whatever they sent counts as life, not only what they sent to us.
  std::vector<absl::Time> heard;
  for (const base::MemberId& id : late) heard.push_back(agent_->LastHeard(id));
  Tell([&](Core& core, Core::Token, absl::Time now) {
    for (size_t i = 0; i < late.size(); ++i) core.Heard(late[i], heard[i]);
    return core.Tick(now);
  });
}

void MembershipService::Close(absl::Status reason) {
  std::map<Core::Token, Responder> waiting;
  {
    absl::MutexLock lock(&mu_);
    if (!closed_.ok()) return;
    closed_ = reason;
    waiting.swap(waiting_);
    joins_.clear();
  }
  for (auto& [token, responder] : waiting) std::move(responder).Reply(reason);
}

}  // namespace Atoll::rpc
