// A worker's membership in its job.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "atoll/cluster/launch.h"
#include "atoll/rref/node.h"

namespace Atoll::client {

/// Owns the rank's rref::Node. Outlives its Trainers. Thread-safe.
class Session {
 public:
  static absl::StatusOr<std::unique_ptr<Session>> Join(absl::StatusOr<cluster::Launch> launch,
                                                       rref::NodeOptions options = {});
  ~Session();
  /// Leaves in order; later use of its trainers fails with FailedPrecondition.
  absl::Status Leave(absl::Duration limit = absl::Seconds(10));
  rref::Node& node() { return *node_; }

  /// Index of this worker among the job's workers, and how many there were at the launch.
  int worker_index() const;
  int worker_count() const;

 private:
  explicit Session(std::unique_ptr<rref::Node> node);
  std::unique_ptr<rref::Node> node_;
};

}  // namespace Atoll::client
