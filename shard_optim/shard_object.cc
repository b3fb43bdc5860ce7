#include "atoll/shard_optim/shard_object.h"

#include "atoll/base/status.h"

namespace Atoll::shard_optim {

void ShardObject::Call(rpc::ServerCall call) {
  shard_->Handle(call.caller, call.method, std::move(call.request), call.deadline,
                 [responder = std::move(call.responder)](absl::StatusOr<rpc::Payload> reply) mutable {
                   std::move(responder).Reply(std::move(reply));
                 });
}

absl::StatusOr<std::vector<at::Tensor>> ShardObject::Allocate(const base::MemberId& caller,
                                                              const rpc::MethodId& method,
                                                              absl::string_view body,
                                                              absl::Span<const rpc::TensorMeta> metas) {
  return shard_->Allocate(caller, method, body, metas);
}

void ShardObject::OnPeerGone(const base::MemberId& member, const absl::Status& reason) {
  shard_->OnPeerGone(member, reason);
}

absl::Status RegisterShardClass(rref::ObjectSpace& objects, ShardEnvironment environment) {
  return objects.RegisterClass(
      kShardClass,
      [environment](const base::MemberId& creator,
                    rpc::Received received) -> absl::StatusOr<std::shared_ptr<rref::Object>> {
        ATOLL_ASSIGN_OR_RETURN(ShardArguments arguments, ShardArguments::Decode(received.body));
        ATOLL_ASSIGN_OR_RETURN(std::shared_ptr<Shard> shard,
                               Shard::Create(std::move(arguments), environment));
        return std::make_shared<ShardObject>(std::move(shard));
      });
}

absl::Status RegisterShardClass(rref::ObjectSpace& objects, rpc::Agent& agent, ShardMemory memory) {
  ShardEnvironment environment;
  environment.executor = agent.pool();
  environment.timer = agent.timer();
  environment.clock = agent.clock();
  environment.memory = memory;
  return RegisterShardClass(objects, environment);
}

}  // namespace Atoll::shard_optim
