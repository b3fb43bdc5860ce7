// What is behind ObjectSpace: shared by its handlers (which the agent keeps) and the references it gave out,
// so that either may outlive it; after Close it only refuses. Private to this folder.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/executor.h"
#include "atoll/base/fork.h"
#include "atoll/rpc/buffer_pool.h"
#include "atoll/rref/departed_core.h"
#include "atoll/rref/fork_core.h"
#include "atoll/rref/rref.h"

namespace Atoll::rref {

/// Thread-safe. No object is called, made or destroyed under the lock.
class Space : public std::enable_shared_from_this<Space> {
 public:
  explicit Space(rpc::Agent* agent);

  /// Registers rref's methods with the agent.
  absl::Status Serve();
  /// Refuses all from now on, waits until nobody uses the agent, and destroys the objects. Not in a child of
  /// fork, which has no right to: see fork_mark.
  void Close();
  const base::ForkMark& fork_mark() const { return fork_mark_; }

  absl::Status RegisterClass(std::string class_name, Factory factory);
  base::ForkId NewFork();
  absl::StatusOr<std::shared_ptr<Object>> Local(const base::ObjectId& id) const;
  absl::Status Unpin(absl::string_view pinned_name);
  std::vector<ObjectSpace::Entry> List() const;
  void OnPeerGone(const base::MemberId& member, absl::Status reason);

  /// The agent, which is there while this lives: Close waits for its end. For a call to be made, no longer.
  struct EndUse {
    std::shared_ptr<const Space> space;
    void operator()(rpc::Agent*) const;
  };
  using AgentUse = std::unique_ptr<rpc::Agent, EndUse>;
  /// FailedPrecondition (ran: no) after Close, and in a child of fork.
  absl::StatusOr<AgentUse> UseAgent() const;
  /// Unavailable (ran: no) if `owner` is gone.
  absl::Status CheckOwner(const base::MemberId& owner) const;

 private:
  struct Held {
    std::string class_name;
    std::shared_ptr<Object> object;  // Null while its factory runs.
  };
  using Replies = std::vector<std::pair<rpc::Responder, absl::StatusOr<base::ObjectId>>>;

  void HandleCreate(rpc::ServerCall call);
  void HandleFind(rpc::ServerCall call);
  void HandleRelease(rpc::ServerCall call);
  void HandleCall(rpc::ServerCall call);
  absl::StatusOr<std::vector<at::Tensor>> AllocateForCall(const base::MemberId& caller,
                                                          absl::string_view body,
                                                          absl::Span<const rpc::TensorMeta> metas);
  // Runs the factory and answers everybody who waits for `id`.
  void Make(const base::ObjectId& id, const std::string& class_name, const Factory& factory,
            const base::MemberId& creator, rpc::Received arguments);
  absl::Status CheckCallerLocked(const base::ForkId& fork, const base::MemberId& caller) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // Ends a use of `object` on a thread that must not run its destructor: the last holder may have let go.
  void LetGo(const base::ObjectId& id, std::shared_ptr<Object> object);
  // Takes the objects out; they are destroyed on the pool.
  void Drop(const std::vector<base::ObjectId>& ids);

  const base::ForkMark fork_mark_;
  rpc::Agent* const agent_;
  const std::shared_ptr<base::SerialExecutor> events_;  // OnPeerGone of objects, in order.
  const std::shared_ptr<rpc::BufferPool> buffers_;      // Of objects that do not say where tensors land.

  mutable absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  mutable int uses_ ABSL_GUARDED_BY(mu_) = 0;  // AgentUses that live.
  ForkCore core_ ABSL_GUARDED_BY(mu_);
  uint64_t next_fork_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<std::string, std::shared_ptr<const Factory>> classes_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<base::ObjectId, Held> objects_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<base::ForkId, rpc::Responder> waiting_ ABSL_GUARDED_BY(mu_);
  Departed gone_ ABSL_GUARDED_BY(mu_){kMostDeparted};
};

}  // namespace Atoll::rref
