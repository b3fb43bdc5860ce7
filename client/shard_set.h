// The shards of one model, one on each owner, as a worker calls them.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "atoll/base/status.h"
#include "atoll/client/session.h"
#include "atoll/rref/rref.h"
#include "atoll/shard_optim/messages.h"

namespace Atoll::client {

/// Immutable once open; thread-safe.
class ShardSet {
 public:
  /// Creates the shards on the job's owners, or finds them. FailedPrecondition if the job has no owners, or
  /// one is gone; errors name the owner.
  static absl::StatusOr<std::unique_ptr<ShardSet>> Open(Session& session,
                                                        const shard_optim::ShardArguments& arguments,
                                                        absl::Time deadline);

  int count() const { return static_cast<int>(shards_.size()); }
  const std::string& owner(int index) const { return shards_[index]->owner().name; }
  /// What every owner was told.
  const shard_optim::ShardArguments& arguments() const { return arguments_; }
  rpc::Agent* agent() const { return agent_; }

  template <class Request>
  struct Answer {
    typename Request::Reply reply;
    std::vector<at::Tensor> tensors;
  };

  /// One call; `done` runs as rpc::OnReply does. Errors name the owner.
  template <class Request>
  void Call(int owner, const Request& request, std::vector<rpc::OutTensor> tensors, rpc::CallOptions options,
            absl::AnyInvocable<void(absl::StatusOr<Answer<Request>>)> done) const {
    rpc::Payload payload{request.Encode(), std::move(tensors)};
    shards_[owner]->Call(Request::Method(), std::move(payload), std::move(options),
                         [done = std::move(done)](absl::StatusOr<rpc::Received> reply) mutable {
                           if (!reply.ok()) return std::move(done)(reply.status());
                           auto decoded = Request::Reply::Decode(reply->body);
                           if (!decoded.ok())
                             return std::move(done)(base::Annotate(decoded.status(), "an owner's answer"));
                           std::move(done)(Answer<Request>{*std::move(decoded), std::move(reply->tensors)});
                         });
  }

  /// A call without tensors to every owner at once, `requests` in the order of owners (or one for all);
  /// waits for all answers. The first owner's error, in order.
  template <class Request>
  absl::StatusOr<std::vector<typename Request::Reply>> CallAll(const std::vector<Request>& requests,
                                                               absl::Duration limit) const {
    std::vector<base::Future<rpc::Received>> futures;
    for (int i = 0; i < count(); ++i) {
      const Request& request = requests[requests.size() == 1 ? 0 : i];
      rpc::CallOptions options;
      options.timeout = limit;
      futures.push_back(shards_[i]->Call(Request::Method(), rpc::Payload{request.Encode(), {}}, options));
    }
    std::vector<typename Request::Reply> replies;
    absl::Status status;
    for (int i = 0; i < count(); ++i) {
      auto received = futures[i].Wait(limit + absl::Seconds(5));  // The call's own limit comes first.
      auto reply = received.ok() ? Request::Reply::Decode(received->body) : received.status();
      if (reply.ok()) {
        replies.push_back(*std::move(reply));
      } else {
        status.Update(base::Annotate(reply.status(), owner(i)));
      }
    }
    if (!status.ok()) return status;
    return replies;
  }

 private:
  explicit ShardSet(rpc::Agent* agent, shard_optim::ShardArguments arguments)
      : agent_(agent), arguments_(std::move(arguments)) {}

  rpc::Agent* const agent_;
  const shard_optim::ShardArguments arguments_;
  std::vector<std::shared_ptr<rref::RRef>> shards_;
};

}  // namespace Atoll::client
