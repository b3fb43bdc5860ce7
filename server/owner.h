// An owner's process: serves shards to the job's workers until they have gone.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/rref/node.h"
#include "atoll/server/lifetime_core.h"
#include "atoll/shard_optim/shard.h"

namespace Atoll::server {

struct OwnerOptions {
  rref::NodeOptions node;
  /// How long workers may go on after Stop, or after another owner died.
  absl::Duration patience = absl::Seconds(5);
  shard_optim::ShardMemory memory;  ///< Of each model's shard.
  /// Gets lines for people about who came and went, without their end. Called by Run alone, under no lock: it
  /// may wait, and then only Run waits with it.
  std::function<void(absl::string_view)> say = [](absl::string_view) {};
};

/// Thread-safe. Owns the rank's Node.
class Owner {
 public:
  /// Joins the job as the owner that `launch` says, with shards' class registered before any worker can ask
  /// for one. Errors as of rref::Node::Start.
  static absl::StatusOr<std::unique_ptr<Owner>> Start(const cluster::Launch& launch, OwnerOptions options);
  ~Owner();
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  /// Waits until the job is over, then leaves. OK: the workers left in order (some may have died before), or
  /// Stop was called. Aborted: all workers died or failed, or another owner did; the message has each reason.
  absl::Status Run();
  /// Asks Run to end once the workers have left, or after `patience`. From any thread; does not wait.
  void Stop();

  rref::Node& node() { return *node_; }

 private:
  /// What observers share with Run: they may run after Run has returned.
  struct Watch;

  Owner(OwnerOptions options, std::unique_ptr<rref::Node> node, std::shared_ptr<Watch> watch);
  /// Waits for lines to say, or for the end.
  LifetimeCore::Verdict Await(std::vector<std::string>* lines);

  const OwnerOptions options_;
  const std::shared_ptr<Watch> watch_;
  const std::unique_ptr<rref::Node> node_;
};

}  // namespace Atoll::server
