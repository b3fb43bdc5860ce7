#include "atoll/server/owner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/clock.h"
#include "atoll/base/status.h"
#include "atoll/server/shards.h"
#include "atoll/shard_optim/shard_object.h"

namespace Atoll::server {

struct Owner::Watch {
  Watch(std::string own_name, const OwnerOptions& options)
      : self(std::move(own_name)), core(options.patience), say(options.say) {}

  /// What Run waits for: something new, or its own time.
  bool Changed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return changed; }

  const std::string self;
  const base::RealClock clock;
  absl::Mutex mu;
  bool over ABSL_GUARDED_BY(mu) = false;  // We are leaving: what comes now is no news.
  LifetimeCore core ABSL_GUARDED_BY(mu);
  bool changed ABSL_GUARDED_BY(mu) = false;
  const std::function<void(absl::string_view)> say ABSL_GUARDED_BY(mu);

  void OnEvent(const rpc::MembershipEvent& event) {
    absl::MutexLock lock(&mu);
    if (over) return;
    const std::string& name = event.member.id.name;
    switch (event.kind) {
      case rpc::MembershipEvent::Kind::kJoined:
        core.OnJoined(name, event.member.role == cluster::RoleName(cluster::Role::kWorker));
        say(absl::StrCat(name, " joined"));
        break;
      case rpc::MembershipEvent::Kind::kLeft:
        core.OnLeft(name);
        say(absl::StrCat(name, " left"));
        break;
      case rpc::MembershipEvent::Kind::kDead:
        if (name == self) {
          core.OnExpelled(event.reason.message());
          break;
        }
        core.OnDead(name, event.reason.message(), clock.Now());
        say(absl::StrCat(name, " died: ", event.reason.message(), "; ", core.workers_here(),
                         " workers go on"));
        break;
    }
    changed = true;
  }
};

absl::StatusOr<std::unique_ptr<Owner>> Owner::Start(const cluster::Launch& launch, OwnerOptions options) {
  if (launch.role != cluster::Role::kOwner) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", launch.rank, " is a worker's, not an owner's"));
  }
  options.node.before_join = [](rref::ObjectSpace& objects, rpc::Agent& agent) {
    return shard_optim::RegisterShardClass(objects, agent);
  };
  auto watch = std::make_shared<Watch>(launch.name, options);
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<rref::Node> node, rref::Node::Start(launch, options.node));
  {
    // Under the lock, so that no event is handled before those who are here are known.
    absl::MutexLock lock(&watch->mu);
    node->membership().OnEvent([watch](const rpc::MembershipEvent& event) { watch->OnEvent(event); });
    const std::string worker_role(cluster::RoleName(cluster::Role::kWorker));
    for (const rpc::MemberInfo& member : node->membership().Members()) {
      if (member.rank != base::Rank(launch.rank))
        watch->core.OnJoined(member.id.name, member.role == worker_role);
    }
    // All were here when Start returned: who is gone already has left between then and now.
    for (int i = watch->core.workers_here(); i < launch.world_size - launch.owners; ++i) {
      const std::string gone = absl::StrCat("gone", i);
      watch->core.OnJoined(gone, true);
      watch->core.OnLeft(gone);
    }
  }
  return std::unique_ptr<Owner>(new Owner(std::move(options), std::move(node), std::move(watch)));
}

Owner::Owner(OwnerOptions options, std::unique_ptr<rref::Node> node, std::shared_ptr<Watch> watch)
    : options_(std::move(options)), watch_(std::move(watch)), node_(std::move(node)) {}

Owner::~Owner() = default;

void Owner::Stop() {
  absl::MutexLock lock(&watch_->mu);
  watch_->core.OnStop(watch_->clock.Now());
  watch_->changed = true;
}

absl::Status Owner::Run() {
  LifetimeCore::Verdict verdict;
  std::string what_failed;
  {
    absl::MutexLock lock(&watch_->mu);
    while ((verdict = watch_->core.At(watch_->clock.Now())) == LifetimeCore::Verdict::kServe) {
      watch_->changed = false;
      const absl::Time next = watch_->core.NextCheck();
      const absl::Duration wait =
          next == absl::InfiniteFuture() ? absl::InfiniteDuration() : next - watch_->clock.Now();
      watch_->mu.AwaitWithTimeout(absl::Condition(watch_.get(), &Watch::Changed),
                                  std::max(wait, absl::ZeroDuration()));
    }
    what_failed = watch_->core.WhatFailed();
    watch_->over = true;
  }
  SayFacts();
  const absl::Status left = node_->Stop(options_.patience);
  if (verdict == LifetimeCore::Verdict::kFailed) {
    return absl::AbortedError(absl::StrCat("the job broke: ", what_failed));
  }
  if (!left.ok() && verdict == LifetimeCore::Verdict::kDone) {
    return base::Annotate(left, "the job is done, but leaving it failed");
  }
  return absl::OkStatus();
}

void Owner::SayFacts() {
  for (const std::string& line : DescribeShards(node_->objects())) {
    absl::MutexLock lock(&watch_->mu);
    watch_->say(line);
  }
}

}  // namespace Atoll::server
