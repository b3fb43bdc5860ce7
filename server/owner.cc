#include "atoll/server/owner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "atoll/base/clock.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/server/shards.h"
#include "atoll/shard_optim/shard_object.h"

namespace Atoll::server {
namespace {

constexpr size_t kMostLines = 4096;  // That wait to be said; beyond it news is not told.

}  // namespace

struct Owner::Watch : std::enable_shared_from_this<Owner::Watch> {
  Watch(const cluster::Launch& launch, const OwnerOptions& options)
      : self(launch.name), core(options.patience, launch.world_size - 1) {}

  /// What Run waits for: something new, or its own time.
  bool Changed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return changed; }

  const std::string self;
  const base::RealClock clock;
  absl::Mutex mu;
  bool over ABSL_GUARDED_BY(mu) = false;  // We are leaving: what comes now is no news.
  LifetimeCore core ABSL_GUARDED_BY(mu);
  bool changed ABSL_GUARDED_BY(mu) = false;
  std::vector<std::string> lines ABSL_GUARDED_BY(mu);  // For Run to say.

  void Say(std::string line) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (lines.size() < kMostLines) lines.push_back(std::move(line));
  }

  void OnJoined(const rpc::MemberInfo& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (member.id.name == self) return;
    if (core.OnJoined(member.id.name, member.role == cluster::RoleName(cluster::Role::kWorker))) {
      Say(absl::StrCat(member.id.name, " joined"));
    }
  }

  void OnGone(const std::string& name, const absl::Status& reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    const std::string why = base::OneLine(reason.message());  // It is theirs.
    core.OnDead(name, why, clock.Now());
    Say(absl::StrCat(name, " died: ", why, "; ", core.workers_here(), " workers go on"));
  }

  /// From the first moment of our membership on.
  void Observe(rpc::Membership& membership) {
    // Under the lock, so that no event is handled before those who are here are known.
    absl::MutexLock lock(&mu);
    membership.OnEvent(
        [watch = shared_from_this()](const rpc::MembershipEvent& event) { watch->OnEvent(event); });
    membership.OnError([watch = shared_from_this()](const absl::Status& error) { watch->OnError(error); });
    for (const rpc::MemberInfo& member : membership.Members()) OnJoined(member);
  }

  void OnError(const absl::Status& error) {
    absl::MutexLock lock(&mu);
    if (over) return;
    core.OnUnled(base::OneLine(error.message()), clock.Now());
    changed = true;
  }

  void OnEvent(const rpc::MembershipEvent& event) {
    absl::MutexLock lock(&mu);
    if (over) return;
    const std::string& name = event.member.id.name;
    switch (event.kind) {
      case rpc::MembershipEvent::Kind::kJoined:
        OnJoined(event.member);
        break;
      case rpc::MembershipEvent::Kind::kLeft:
        if (event.reason.ok()) {
          core.OnLeft(name);
          Say(absl::StrCat(name, " left"));
          break;
        }
        OnGone(name, event.reason);
        break;
      case rpc::MembershipEvent::Kind::kDead:
        if (name == self) {
          core.OnExpelled(event.reason.message());
          break;
        }
        OnGone(name, event.reason);
        break;
    }
    changed = true;
  }
};

absl::StatusOr<std::unique_ptr<Owner>> Owner::Start(const cluster::Launch& launch, OwnerOptions options) {
  if (launch.role != cluster::Role::kOwner) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", launch.rank, " is a worker's, not an owner's"));
  }
  options.node.before_join = [also = std::move(options.node.before_join), memory = options.memory](
                                 rref::ObjectSpace& objects, rpc::Agent& agent) {
    ATOLL_RETURN_IF_ERROR(shard_optim::RegisterShardClass(objects, agent, memory));
    return also ? also(objects, agent) : absl::OkStatus();
  };
  auto watch = std::make_shared<Watch>(launch, options);
  options.node.on_joined = [watch, also = std::move(options.node.on_joined)](rpc::Membership& membership) {
    watch->Observe(membership);
    if (also) also(membership);
  };
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<rref::Node> node, rref::Node::Start(launch, options.node));
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

LifetimeCore::Verdict Owner::Await(std::vector<std::string>* lines) {
  absl::MutexLock lock(&watch_->mu);
  LifetimeCore::Verdict verdict;
  while ((verdict = watch_->core.At(watch_->clock.Now())) == LifetimeCore::Verdict::kServe &&
         watch_->lines.empty()) {
    watch_->changed = false;
    const absl::Time next = watch_->core.NextCheck();
    const absl::Duration wait =
        next == absl::InfiniteFuture() ? absl::InfiniteDuration() : next - watch_->clock.Now();
    base::AwaitFor(watch_->mu, absl::Condition(watch_.get(), &Watch::Changed),
                   std::max(wait, absl::ZeroDuration()));
  }
  *lines = std::exchange(watch_->lines, {});
  if (verdict != LifetimeCore::Verdict::kServe) watch_->over = true;
  return verdict;
}

absl::Status Owner::Run() {
  LifetimeCore::Verdict verdict;
  do {
    std::vector<std::string> lines;
    verdict = Await(&lines);
    for (const std::string& line : lines) options_.say(line);
  } while (verdict == LifetimeCore::Verdict::kServe);
  std::string what_failed;
  bool workers_stay = false;
  {
    absl::MutexLock lock(&watch_->mu);
    what_failed = watch_->core.WhatFailed();
    workers_stay = watch_->core.workers_here() > 0;
  }
  for (const std::string& line : DescribeShards(node_->objects())) options_.say(line);
  // Who has had its time gets no more.
  const absl::Status left = node_->Stop(workers_stay ? options_.patience / 4 : options_.patience);
  if (verdict == LifetimeCore::Verdict::kFailed) {
    return absl::AbortedError(absl::StrCat("the job broke: ", what_failed));
  }
  if (!left.ok() && verdict == LifetimeCore::Verdict::kDone) {
    return base::Annotate(left, "the job is done, but leaving it failed");
  }
  return absl::OkStatus();
}

}  // namespace Atoll::server
