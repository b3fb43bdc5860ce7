#include "atoll/rpc/membership.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/clock.h"
#include "atoll/base/fork.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/rpc/membership_client.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {
namespace {

constexpr absl::Duration kFirstRetry = absl::Milliseconds(20);
constexpr absl::Duration kLastRetry = absl::Milliseconds(500);
constexpr absl::Duration kLongestMeeting = absl::Seconds(5);
constexpr absl::Duration kLeaveOnDestruction = absl::Seconds(1);

class MembershipImpl : public Membership {
 public:
  MembershipImpl(Agent* agent, std::shared_ptr<MembershipClient> client)
      : agent_(agent), client_(std::move(client)) {}
  ~MembershipImpl() override {
    if (fork_mark_.in_child()) {
      base::Abandon(std::shared_ptr<MembershipClient>(client_));
      return;
    }
    // The coordinator does not wait for the others here: that is what Leave is for.
    client_
        ->Leave(client_->is_coordinator() ? absl::ZeroDuration() : kLeaveOnDestruction,
                absl::AbortedError("it ended without leaving in order"))
        .IgnoreError();
    client_->Stop();
  }
  const MemberInfo& self() const override { return client_->self(); }
  absl::Status status() const override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership"));
    return client_->status();
  }
  std::vector<MemberInfo> Members() const override {
    return fork_mark_.in_child() ? std::vector<MemberInfo>() : client_->Members();
  }
  absl::StatusOr<MemberInfo> Find(base::Rank rank) const override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership::Find"));
    return client_->Find(rank);
  }
  absl::StatusOr<MemberInfo> Find(absl::string_view name) const override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership::Find"));
    return client_->Find(name);
  }
  absl::Status WaitForAll(absl::Duration limit) override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership::WaitForAll"));
    return client_->WaitForAll(limit);
  }
  absl::Status WaitForCount(int count, absl::Duration limit) override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership::WaitForCount"));
    return client_->WaitForCount(count, limit);
  }
  void OnEvent(std::function<void(const MembershipEvent&)> observer) override {
    if (!fork_mark_.in_child()) client_->OnEvent(std::move(observer));
  }
  void OnError(std::function<void(absl::Status)> observer) override {
    if (fork_mark_.in_child()) return observer(fork_mark_.Error("Membership::OnError"));
    client_->OnError(std::move(observer));
  }
  absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view name, std::string value,
                                                     absl::Duration limit,
                                                     std::vector<std::string> participants) override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership::AllGather"));
    return client_->AllGather(name, std::move(value), limit, std::move(participants));
  }
  absl::Status Leave(absl::Duration limit, const absl::Status& why) override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Membership::Leave"));
    return client_->Leave(limit, why);
  }

  base::Future<Received> Call(base::Rank to, const MethodId& method, Payload request,
                              CallOptions options) override {
    absl::StatusOr<MemberInfo> member = Find(to);
    if (member.ok()) return agent_->Call(member->id.name, method, std::move(request), std::move(options));
    return Refuse<Received>(std::move(request), method, member.status());
  }
  base::Future<base::Unit> Send(base::Rank to, const MethodId& method, Payload request) override {
    absl::StatusOr<MemberInfo> member = Find(to);
    if (member.ok()) return agent_->Send(member->id.name, method, std::move(request));
    return Refuse<base::Unit>(std::move(request), method, member.status());
  }

 private:
  /// A call to a rank that nobody has.
  template <class T>
  base::Future<T> Refuse(Payload request, const MethodId& method, const absl::Status& why) {
    base::Promise<T> promise;
    auto end = [promise, request = std::move(request),
                status = base::WithRan(
                    base::Annotate(
                        why, absl::StrCat("calling ", MethodText(method.name, method.version), " (ran: no)")),
                    base::Ran::kNo)]() mutable {
      for (OutTensor& tensor : request.tensors) {
        if (tensor.on_return) RunCallback("the end of a loan", std::move(tensor.on_return));
      }
      promise.Set(std::move(status));
    };
    if (fork_mark_.in_child()) {
      end();  // There is no other thread.
    } else {
      agent_->pool()->Schedule([end = std::move(end)]() mutable { RunCallback(kOnReply, std::move(end)); });
    }
    return promise.future();
  }

  Agent* const agent_;  // Outlives us.
  const base::ForkMark fork_mark_;
  const std::shared_ptr<MembershipClient> client_;
};

absl::Status CheckOptions(const MembershipOptions& options, bool coordinator) {
  if (options.world_size == kOpenWorld) {
    const bool any = options.rank == kAnyRank && !coordinator;
    if (!any && (options.rank.value() < 0 || options.rank.value() >= cluster::MembershipCore::kMostRanks)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", options.rank.value(), " in an open world: it should be from 0 to ",
          cluster::MembershipCore::kMostRanks - 1, coordinator ? "" : ", or kAnyRank for one that is free"));
    }
  } else if (options.world_size < 1 || options.rank.value() < 0 ||
             options.rank.value() >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", options.rank.value(), " in a world of ",
                                                   options.world_size, ": it should be from 0 to ",
                                                   options.world_size - 1));
  }
  if (options.lease < absl::Milliseconds(1) || options.lease > absl::Hours(24)) {
    return absl::InvalidArgumentError("a lease should be from 1 ms to 24 hours");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Membership>> StartClient(Agent* agent,
                                                        std::shared_ptr<MembershipClient> client,
                                                        JoinReply reply) {
  ATOLL_RETURN_IF_ERROR(client->Start(std::move(reply)));
  return std::unique_ptr<Membership>(std::make_unique<MembershipImpl>(agent, std::move(client)));
}

/// One attempt to find the coordinator and to be let in.
struct Attempt {
  base::MemberId coordinator;
  JoinReply reply;
};
absl::StatusOr<Attempt> TryToJoin(Agent* agent, const std::vector<std::string>& coordinator,
                                  const MembershipOptions& options, absl::Duration limit) {
  Attempt attempt;
  absl::Duration meeting = std::min(limit, kLongestMeeting);
  ATOLL_ASSIGN_OR_RETURN(attempt.coordinator,
                         agent->Meet(coordinator, meeting).Wait(meeting + absl::Seconds(1)));
  if (attempt.coordinator.name == agent->self().name) {
    return absl::AlreadyExistsError(absl::StrCat(agent->self().ToString(), " (rank ", options.rank.value(),
                                                 ") cannot join: its name belongs to the coordinator ",
                                                 attempt.coordinator.ToString()));
  }
  Payload request;
  request.body = Encode(JoinRequest{options.world_size, options.rank, options.role, agent->addresses()});
  CallOptions call;
  call.timeout = limit;
  ATOLL_ASSIGN_OR_RETURN(
      Received received,
      agent->Call(attempt.coordinator.name, {kJoinMethod}, std::move(request), std::move(call))
          .Wait(limit + absl::Seconds(1)));
  ATOLL_ASSIGN_OR_RETURN(attempt.reply, DecodeJoinReply(received.body));
  return attempt;
}

void Pause(absl::Duration time) {
  bool never = false;
  absl::Mutex mu;
  absl::MutexLock lock(&mu);
  base::AwaitFor(mu, absl::Condition(&never), time);
}

/// Nobody was there, it died meanwhile, or it is there but does not serve yet.
bool MayComeLater(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         (absl::IsNotFound(status) && base::GetRan(status) != base::Ran::kYes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Membership>> Membership::Serve(Agent* agent, MembershipOptions options) {
  ATOLL_RETURN_IF_ERROR(CheckOptions(options, /*coordinator=*/true));
  ATOLL_RETURN_IF_ERROR(MembershipClient::ServePing(agent));
  cluster::MembershipCore::Options core;
  core.world_size = options.world_size;
  core.lease = options.lease;
  MemberInfo self{agent->self(), options.rank, options.role, agent->addresses()};
  ATOLL_ASSIGN_OR_RETURN(std::shared_ptr<MembershipService> service,
                         MembershipService::Start(agent, core, self));
  JoinReply reply;
  reply.lease = options.lease;
  reply.event = 1;  // Ourselves; who was faster than this line comes as an event.
  reply.members = {self};
  return StartClient(agent,
                     std::make_shared<MembershipClient>(agent, options, agent->self(), std::move(service)),
                     std::move(reply));
}

absl::StatusOr<std::unique_ptr<Membership>> Membership::Join(Agent* agent,
                                                             std::vector<std::string> coordinator,
                                                             MembershipOptions options) {
  ATOLL_RETURN_IF_ERROR(CheckOptions(options, /*coordinator=*/false));
  ATOLL_RETURN_IF_ERROR(MembershipClient::ServePing(agent));
  const absl::Time deadline = agent->clock()->Now() + options.join_limit;
  absl::Duration retry = kFirstRetry;
  while (true) {
    absl::Duration left = std::max(deadline - agent->clock()->Now(), absl::Milliseconds(1));
    absl::StatusOr<Attempt> attempt = TryToJoin(agent, coordinator, options, left);
    if (attempt.ok()) {
      return StartClient(agent,
                         std::make_shared<MembershipClient>(agent, options, attempt->coordinator, nullptr),
                         std::move(attempt->reply));
    }
    absl::Status status = base::Annotate(attempt.status(), "join the job");
    left = deadline - agent->clock()->Now();
    if (!MayComeLater(status)) return status;
    if (left <= retry) {
      return base::Annotate(status, absl::StrCat("no coordinator let us in within ",
                                                 base::DurationText(options.join_limit), "; at last"));
    }
    base::ThreadPool::BlockingScope blocking;
    Pause(retry);
    retry = std::min(2 * retry, kLastRetry);
  }
}

absl::Status Membership::Barrier(absl::string_view name, absl::Duration limit) {
  return AllGather(name, "", limit).status();
}

}  // namespace Atoll::rpc
