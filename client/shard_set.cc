#include "atoll/client/shard_set.h"

#include <algorithm>

#include "atoll/base/clock.h"

namespace Atoll::client {

absl::StatusOr<std::unique_ptr<ShardSet>> ShardSet::Open(Session& session,
                                                         const shard_optim::ShardArguments& arguments,
                                                         absl::Time deadline) {
  rref::Node& node = session.node();
  const int expected = node.launch().owners;
  if (expected == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the job has no owners: all ", node.launch().world_size,
                     " processes are workers, so nobody can hold the model's shards"));
  }
  std::vector<rpc::MemberInfo> owners;
  for (rpc::MemberInfo& member : node.membership().Members()) {
    if (member.role == cluster::RoleName(cluster::Role::kOwner)) owners.push_back(std::move(member));
  }
  std::sort(owners.begin(), owners.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  if (static_cast<int>(owners.size()) != expected) {
    std::string alive;
    for (const auto& owner : owners) absl::StrAppend(&alive, alive.empty() ? "" : ", ", owner.id.name);
    return absl::FailedPreconditionError(absl::StrCat("the job was launched with ", expected, " owners, but ",
                                                      owners.size(), " are there (", alive, ")"));
  }
  auto set = std::unique_ptr<ShardSet>(new ShardSet(&node.agent(), arguments));
  std::vector<base::Future<std::shared_ptr<rref::RRef>>> created;
  for (int i = 0; i < expected; ++i) {
    shard_optim::ShardArguments own = arguments;
    own.owner = i;
    created.push_back(node.objects().Create(owners[i].id.name, shard_optim::kShardClass,
                                            rpc::Payload{own.Encode(), {}},
                                            shard_optim::ShardName(arguments.model)));
  }
  absl::Status status;
  for (int i = 0; i < expected; ++i) {
    auto shard = created[i].Wait(std::max(deadline - base::Now(), absl::Milliseconds(1)));
    if (shard.ok()) {
      set->shards_.push_back(*std::move(shard));
    } else {
      status.Update(base::Annotate(shard.status(), absl::StrCat("the shard on ", owners[i].id.name)));
    }
  }
  ATOLL_RETURN_IF_ERROR(status);
  return set;
}

}  // namespace Atoll::client
