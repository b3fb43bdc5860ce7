// A worker's membership in its job.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/fork.h"
#include "atoll/cluster/job_key.h"
#include "atoll/cluster/launch.h"
#include "atoll/rref/node.h"

namespace Atoll::client {

/// Owns the rank's rref::Node. Outlives its Trainers. Thread-safe.
///
/// It belongs to the process that joined. A child of fork (a data loader, say) may hold it, but not use it: there
/// Leave and all of its trainers fail with FailedPrecondition, and destructors do nothing. Who wants ranks that
/// are forked joins in each of them, after the fork.
class Session {
 public:
  /// Joins as the worker that `launch` says, and waits until the whole job is there. Errors: what is wrong
  /// with the launch (its own status is passed on; InvalidArgument for a rank that is no worker, or a job
  /// without one), what EnsureJobKey says of a missing key, and those of rref::Node::Start.
  static absl::StatusOr<std::unique_ptr<Session>> Join(absl::StatusOr<cluster::Launch> launch,
                                                       rref::NodeOptions options = {});
  /// Without a Leave before it the others hear that this worker failed.
  ~Session();
  /// Leaves in order, or, if `why` is an error, says that this worker failed and why: a job whose workers all
  /// failed has failed. Later use of its trainers fails with FailedPrecondition.
  absl::Status Leave(absl::Duration limit = absl::Seconds(10), const absl::Status& why = absl::OkStatus());
  /// FailedPrecondition once Leave was called, and in a child of fork.
  absl::Status CheckActive() const;
  bool active() const { return !left_.load(std::memory_order_acquire) && !in_child(); }
  bool in_child() const { return fork_mark_.in_child(); }
  rref::Node& node() { return *node_; }

  /// Index of this worker among the job's workers, and how many there were at the launch.
  int worker_index() const;
  int worker_count() const;

  /// One trainer a model: a second would answer for the same worker. AlreadyExists.
  absl::Status ClaimModel(absl::string_view name);
  void ReleaseModel(absl::string_view name);

 private:
  Session(std::unique_ptr<cluster::SharedKeyFile> key_file, std::unique_ptr<rref::Node> node);
  const base::ForkMark fork_mark_;
  const std::unique_ptr<cluster::SharedKeyFile> key_file_;  // Of a job on one host without a key of its own.
  const std::unique_ptr<rref::Node> node_;
  std::atomic<bool> left_{false};
  absl::Mutex mu_;
  absl::flat_hash_set<std::string> models_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::client
