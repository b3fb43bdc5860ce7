#include "atoll/server/shards.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/clock.h"
#include "atoll/base/future.h"
#include "atoll/base/status.h"
#include "atoll/shard_optim/messages.h"

namespace Atoll::server {
namespace {

/// Asks an object of ours, as a caller would, without the network.
absl::StatusOr<shard_optim::Info::Reply> AskInfo(rref::Object& object, absl::Duration limit) {
  const base::Promise<std::string> promise;
  rpc::ServerCall call;
  call.method = shard_optim::Info::Method();
  call.deadline = base::Now() + limit;
  call.cancelled = [] { return false; };
  call.responder = rpc::Responder::From([promise](absl::StatusOr<rpc::Payload> reply) {
    promise.Set(reply.ok() ? absl::StatusOr<std::string>(std::move(reply->body)) : reply.status());
  });
  object.Call(std::move(call));
  ATOLL_ASSIGN_OR_RETURN(const std::string body, promise.future().Wait(limit));
  return shard_optim::Info::Reply::Decode(body);
}

}  // namespace

std::vector<std::string> DescribeShards(rref::ObjectSpace& objects) {
  std::vector<std::string> lines;
  for (const rref::ObjectSpace::Entry& entry : objects.List()) {
    if (entry.class_name != shard_optim::kShardClass) continue;
    const absl::StatusOr<std::shared_ptr<rref::Object>> object = objects.Local(entry.id);
    if (!object.ok()) continue;
    const absl::StatusOr<shard_optim::Info::Reply> info = AskInfo(**object, absl::Seconds(5));
    if (!info.ok()) {
      lines.push_back(absl::StrCat(entry.pinned_name, ": ", info.status().message()));
    } else {
      lines.push_back(absl::StrCat(entry.pinned_name, ": ", info->elements, " parameters, ",
                                   info->state_bytes, " bytes of optimizer state, ", info->steps, " steps"));
    }
  }
  return lines;
}

}  // namespace Atoll::server
