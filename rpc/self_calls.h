// Calls of an agent to itself: the same contract, without the network. Tensors are copied as a message
// would copy them, so that caller and handler never share memory. Internal to rpc. Thread-safe.
#pragma once

#include <memory>
#include <stop_token>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/hub.h"

namespace Atoll::rpc {

class SelfCalls : public std::enable_shared_from_this<SelfCalls> {
 public:
  explicit SelfCalls(std::shared_ptr<Hub> hub) : hub_(std::move(hub)) {}

  void Call(const MethodId& method, Payload request, CallOptions options, OnReply on_reply);
  void Send(const MethodId& method, Payload request, absl::AnyInvocable<void(absl::Status)> on_received);
  /// Ends every call in flight.
  void FailAll(const absl::Status& reason);

 private:
  struct Pending;
  absl::Status Run(const MethodId& method, Payload request, absl::Time deadline, std::stop_token stop,
                   Responder& responder);
  void GiveUp(const std::shared_ptr<Pending>& pending, const absl::Status& why);
  void End(const std::shared_ptr<Pending>& pending, absl::StatusOr<Received> result);
  void Answer(const std::shared_ptr<Pending>& pending, absl::StatusOr<Payload> reply);
  absl::Status Explain(const absl::Status& status, const MethodId& method, base::Ran ran) const;

  const std::shared_ptr<Hub> hub_;
  absl::Mutex mu_;
  absl::flat_hash_set<std::shared_ptr<Pending>> pending_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::rpc
