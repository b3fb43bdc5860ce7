// A Shard as a remote object, and its class.
#pragma once

#include <memory>
#include <vector>

#include "atoll/rpc/agent.h"
#include "atoll/rref/rref.h"
#include "atoll/shard_optim/shard.h"

namespace Atoll::shard_optim {

/// Class kShardClass; the factory's argument is a ShardArguments. Thread-safe.
class ShardObject : public rref::Object {
 public:
  explicit ShardObject(std::shared_ptr<Shard> shard) : shard_(std::move(shard)) {}
  void Call(rpc::ServerCall call) override;
  absl::StatusOr<std::vector<at::Tensor>> Allocate(const base::MemberId& caller, const rpc::MethodId& method,
                                                   absl::string_view body,
                                                   absl::Span<const rpc::TensorMeta> metas) override;
  void OnPeerGone(const base::MemberId& member, const absl::Status& reason) override;
  Shard& shard() { return *shard_; }

 private:
  const std::shared_ptr<Shard> shard_;
};

/// Lets other members create shards here; `environment` as of Shard::Create.
absl::Status RegisterShardClass(rref::ObjectSpace& objects, ShardEnvironment environment);
/// The same on the agent's pool, timer and clock: made to be NodeOptions::before_join.
absl::Status RegisterShardClass(rref::ObjectSpace& objects, rpc::Agent& agent, ShardMemory memory = {});

}  // namespace Atoll::shard_optim
