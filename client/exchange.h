// Moves chunks between a worker's parameters and the owners' shards: pushes of gradients whose replies bring
// the new values, pulls, and the first load. It knows no autograd.
//
//   training thread: Begin, Push ... Push, OpenLanding, Wait          pool: loans return, values land
//
// Held by shared_ptr: calls in flight keep it, and with it all memory that they read or write.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/base/executor.h"
#include "atoll/client/parameters.h"
#include "atoll/client/shard_set.h"
#include "atoll/client/staging.h"
#include "atoll/client/step_core.h"
#include "atoll/shard_optim/layout_core.h"
#include "atoll/shard_optim/messages.h"

namespace Atoll::client {

/// Thread-safe, but one exchange at a time: Begin ... Wait.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  struct Limits {
    size_t window_bytes = 32 << 20;  ///< Sent and not yet received; Push waits beyond it.
    /// Before a push that the owner had no room for is sent again; doubled with each refusal, up to the last.
    absl::Duration first_retry_pause = absl::Milliseconds(20);
    absl::Duration last_retry_pause = absl::Milliseconds(320);
  };
  Exchange(shard_optim::Layout layout, ParameterSet parameters, std::unique_ptr<ShardSet> shards,
           Limits limits);

  const shard_optim::Layout& layout() const { return layout_; }
  const ParameterSet& parameters() const { return parameters_; }
  const ShardSet& shards() const { return *shards_; }
  const Staging& staging() const { return staging_; }

  /// What a push says beside its chunk.
  struct Step {
    int64_t number = 1;
    shard_optim::AdamOptions optimizer;
    bool exact = true;  ///< A value of another step than `number` is an error (sync).
  };
  /// Starts an exchange of all chunks, each of which must be over by `deadline`. Requires that the last one
  /// is over and its loans are back (Wait says so).
  void Begin(absl::Time deadline);
  /// Sends a chunk's gradient: undefined if no segment has one, else flat, of chunk.elements() elements and
  /// lent until the owner has it. Waits while the window is full. What an owner has no room for is sent again
  /// after a pause, until the deadline, and takes part of the window meanwhile.
  void Push(const Step& step, int chunk, at::Tensor gradient, std::string defined);
  /// The owners may send new values of pushes up to `step` from now on.
  void OpenLanding(int64_t step);
  void Pull(int chunk, int64_t min_step);
  /// Collects the parameters' present values for Load. Requires that no exchange is under way.
  void StageValues() const;
  /// Sends the parameters' present values, after StageValues: those of round `step`.
  void Load(int chunk, int64_t step);

  struct Result {
    int contributors = 0;
    int64_t oldest_step = 0;  ///< Of the values that came.
    uint64_t bytes_sent = 0, bytes_received = 0;
  };
  /// Waits until all chunks are over. ResourceExhausted if too many threads wait already. DeadlineExceeded names the owners that still owe some: they may land
  /// later, and until another Wait says that all is over no new exchange may begin. Other errors: the first
  /// chunk's.
  absl::StatusOr<Result> Wait(absl::Time deadline);
  /// No exchange is under way, or the one that timed out is over by now, and no call of it is left; else
  /// DeadlineExceeded.
  absl::Status Settle(absl::Time deadline);
  /// Nothing that was sent can land any more; else DeadlineExceeded. What was not sent stays so.
  absl::Status AwaitLandings(absl::Time deadline);

  /// Names of parameters that may hold half a value, those that are landing among them.
  std::vector<std::string> torn() const;

 private:
  // A push without its answer. Until that comes the owner may say that it had no room, and the same is sent
  // again: the gradient is kept so long. (Gathered ones are only borrowed from staging.)
  struct Pending {
    Step step;
    at::Tensor gradient;
    std::string defined;
    bool refused = false;  // For want of room: it waits to be sent again.
    int refusals = 0;
    size_t bytes() const { return gradient.defined() ? gradient.nbytes() : 0; }
  };
  template <class Over>
  absl::Status AwaitLocked(Over over, absl::Time deadline, const base::ThreadPool::BlockingScope& blocking)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status AdmitLocked(size_t bytes, const base::ThreadPool::BlockingScope& blocking)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool in_rounds() const;
  rpc::OutTensor LendCounted(at::Tensor tensor);
  void SendPush(const Step& step, int chunk, at::Tensor gradient, std::string defined);
  void OnPushed(const Step& step, int chunk,
                absl::StatusOr<ShardSet::Answer<shard_optim::PushGradient>> answer);
  bool Retry(int chunk, const absl::Status& status);
  void Resend(int chunk);
  void Arrived(int chunk, const std::vector<at::Tensor>& tensors, int contributors, int64_t step);
  void Fail(int chunk, absl::Status status);
  rpc::CallOptions LandingOptions(int chunk);
  std::string MissingLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  // The gradients are the user's: whoever calls lets go of them when mu_ is free again.
  using Released = std::vector<at::Tensor>;
  void ForgetLocked(int chunk, Released* released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const shard_optim::Layout layout_;
  const ParameterSet parameters_;
  const std::unique_ptr<ShardSet> shards_;
  const Staging staging_;
  const Limits limits_;

  mutable absl::Mutex mu_;
  StepCore core_ ABSL_GUARDED_BY(mu_);
  absl::Time deadline_ ABSL_GUARDED_BY(mu_);
  size_t unreceived_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int loans_ ABSL_GUARDED_BY(mu_) = 0;
  int opening_ ABSL_GUARDED_BY(mu_) = 0;                              // Calls of OpenLanding.
  std::vector<std::optional<Pending>> pending_ ABSL_GUARDED_BY(mu_);  // By chunk.
  size_t refused_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status landing_status_ ABSL_GUARDED_BY(mu_);  // Of OpenLanding.
  Result result_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::client
