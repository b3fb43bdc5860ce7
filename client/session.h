// A worker's membership in its job.
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/statusor.h"
#include "atoll/cluster/launch.h"
#include "atoll/rref/node.h"

namespace Atoll::client {

/// Owns the rank's rref::Node. Outlives its Trainers. Thread-safe.
class Session {
 public:
  /// Joins as the worker that `launch` says, and waits until the whole job is there. Errors: what is wrong
  /// with the launch (its own status is passed on; InvalidArgument for a rank that is no worker, or a job
  /// without one), and those of rref::Node::Start.
  static absl::StatusOr<std::unique_ptr<Session>> Join(absl::StatusOr<cluster::Launch> launch,
                                                       rref::NodeOptions options = {});
  ~Session();
  /// Leaves in order; later use of its trainers fails with FailedPrecondition.
  absl::Status Leave(absl::Duration limit = absl::Seconds(10));
  /// False once Leave was called.
  bool active() const { return !left_.load(std::memory_order_acquire); }
  rref::Node& node() { return *node_; }

  /// Index of this worker among the job's workers, and how many there were at the launch.
  int worker_index() const;
  int worker_count() const;

 private:
  explicit Session(std::unique_ptr<rref::Node> node);
  std::unique_ptr<rref::Node> node_;
  std::atomic<bool> left_{false};
};

}  // namespace Atoll::client
