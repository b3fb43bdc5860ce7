// A model attached to the job's owners: its gradients leave while backward runs, its new parameters come
// back.
//
//   auto session = Session::Join(cluster::LaunchFromEnvironment());
//   auto trainer = Trainer::Attach(**session, model->named_parameters(),
//                                  {.optimizer = AdamOptions{.lr = 1e-3}, .policy = Sync{}});
//   for (auto& batch : data) {
//     loss(model, batch).backward();
//     ATOLL_RETURN_IF_ERROR((*trainer)->Step().status());
//   }
//
// A gradient leaves from its parameter's hook as soon as it is final, lent where it lies; when backward has
// ended, the owners' new values land in the parameters' own memory. So between the end of backward and the
// return of Step parameters change: read them before or after.
//
// One backward a step. Several, for a batch that does not fit into memory, need an accumulation scope around
// all but the last:
//
//   for (int k = 0; k < n; ++k) {
//     std::optional<AccumulationScope> scope;
//     if (k + 1 < n) scope.emplace((*trainer)->Accumulate());
//     (loss(model, part[k]) / n).backward();
//   }
//   ATOLL_RETURN_IF_ERROR((*trainer)->Step().status());
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "atoll/client/session.h"
#include "atoll/shard_optim/options.h"

namespace Atoll::client {

/// Parameters by name, in the order of the model. Built from anything that is iterated as (key(), value()),
/// as torch::nn::Module::named_parameters() is, or as pairs.
class NamedTensors {
 public:
  // NOLINTBEGIN(google-explicit-constructor): a model's parameters are given as they are.
  NamedTensors(std::vector<std::pair<std::string, at::Tensor>> items) : items_(std::move(items)) {}
  template <class Dict, class = decltype(std::declval<const Dict&>().begin()->key())>
  NamedTensors(const Dict& dict) {
    for (const auto& item : dict) items_.emplace_back(item.key(), item.value());
  }
  // NOLINTEND(google-explicit-constructor)
  const std::vector<std::pair<std::string, at::Tensor>>& items() const { return items_; }

 private:
  std::vector<std::pair<std::string, at::Tensor>> items_;
};

struct TrainerOptions {
  std::string name = "model";  ///< Of the attached model in the job.
  shard_optim::AdamOptions optimizer;
  shard_optim::Policy policy = shard_optim::Sync{};
  size_t chunk_bytes = 4 << 20;
  size_t small_parameter_bytes = 256 << 10;  ///< Parameters below are gathered into shared buckets.
  /// Gradient bytes on their way and not yet received: backward waits in a hook while there are more, so that
  /// a slow network does not pile them up.
  size_t window_bytes = 32 << 20;
  /// The longest time from a backward's first gradient to its end.
  absl::Duration backward_limit = absl::Minutes(10);
  /// Granted on top of the owners' own limit for a round, so that their error, which knows more, comes first.
  absl::Duration answer_margin = absl::Seconds(10);
  /// For the owners to answer, the other workers to attach and the first values to come, in all. (Who comes
  /// late waits for the round under way, too: the owners' limit and answer_margin are granted for its end.)
  absl::Duration attach_limit = absl::Seconds(60);
  /// Async has no rounds: the longest time from the end of backward to an owner's new values.
  absl::Duration async_limit = absl::Seconds(60);
  /// For the owners to hear in the destructor that this worker leaves.
  absl::Duration leave_limit = absl::Seconds(5);
};

/// What a step did.
struct StepResult {
  int64_t step = 0;         ///< Its number, from 1.
  int contributors = 0;     ///< Workers whose gradients are in it (the smallest over the chunks). Async: 1.
  uint64_t bytes_sent = 0;  ///< Tensor bytes of gradients, by this worker.
  uint64_t bytes_received = 0;
};

/// Made by Trainer::Accumulate; open while it lives. Of the trainer's thread; may outlive the trainer.
class [[nodiscard]] AccumulationScope {
 public:
  explicit AccumulationScope(std::function<void()> close) : close_(std::move(close)) {}
  AccumulationScope(AccumulationScope&& other) noexcept : close_(std::exchange(other.close_, nullptr)) {}
  AccumulationScope& operator=(AccumulationScope&&) = delete;
  ~AccumulationScope() {
    if (close_) close_();
  }

 private:
  std::function<void()> close_;
};

/// Used from one thread (that of the training loop, and of its backward). The destructor removes the hooks,
/// leaves the roster, and waits, for answer_margin at the most, for values that may still land in parameters
/// (after a Step that gave up, or none after backward). In a child of fork all of it fails with FailedPrecondition, a backward's gradients go
/// nowhere, and the destructor only removes the hooks.
class Trainer {
 public:
  /// Creates the shards on the owners (or finds them), compares names, shapes, dtypes and strides with the
  /// other workers' (InvalidArgument names the first difference), and takes worker 0's values. Requires:
  /// dense fp32 CPU leaves that require grad, without overlapping memory, attached to no other trainer
  /// (InvalidArgument, FailedPrecondition: name the parameter); a tensor under two names is trained once,
  /// under the first. FailedPrecondition if the job has no owners. A worker that restarted, or comes late,
  /// takes the present values and joins at the next step.
  static absl::StatusOr<std::unique_ptr<Trainer>> Attach(Session& session, NamedTensors parameters,
                                                         TrainerOptions options);
  virtual ~Trainer() = default;

  /// After backward(): waits until every parameter has its new value (sync: of this round). `.grad` of every
  /// parameter is then undefined: gradients were handed over. Errors are those of the calls; after one,
  /// parameters that may be half new are torn (torn()), and Step refuses (FailedPrecondition, naming them)
  /// until Refresh(). A gradient that was in `.grad` already (set by hand, or from before Attach) of a
  /// parameter to which this backward, or none, brought one is contributed too: zero_grad() first if it
  /// should not be.
  /// Errors after which the step was made with the rest of the gradients, so that no Refresh is needed, all
  /// naming a parameter: FailedPrecondition after two backwards without a scope (the first counted) and after
  /// a parameter's memory was exchanged (set_data; its new values are in what it had at Attach); Aborted after
  /// a backward that threw (what had left counted); InvalidArgument for a gradient that does not have its
  /// parameter's dtype and shape. FailedPrecondition, with nothing done and nothing lost, while a scope is
  /// open, and after scopes without a backward behind them.
  virtual absl::StatusOr<StepResult> Step() = 0;

  /// While the scope lives, gradients stay in `.grad`, and those of later backwards are added to them by
  /// autograd, in order: bitwise what it computes without a trainer (sums: divide the losses for a mean). The
  /// first backward after the scope's end hands over the sums from its hooks; parameters that had gradients
  /// in the scope alone leave at its end. Scopes may follow each other, or lie in each other. To begin anew,
  /// undefine all gradients (as zero_grad does) before the next scope. A backward that threw in a scope
  /// leaves its part in the sums: the next Step is Aborted, as after one outside.
  virtual AccumulationScope Accumulate() = 0;

  /// Sets the learning rate from the next step on. In sync all workers must set the same: a disagreement is
  /// refused.
  virtual absl::Status SetLearningRate(double lr) = 0;

  /// Receives all parameters from the owners, as they hold them now; after a failed Step, takes part again:
  /// the next Step makes the same one where an owner has it not. So if the round ended when only a part of
  /// its chunks was applied, a parameter may have some chunks of that step and some of the one before: it stays
  /// torn() until the step is made. (Async: what an owner applied before the failure counts, and the repeated
  /// gradients do not count there.)
  virtual absl::Status Refresh() = 0;
  /// Names of parameters that may hold half a value: do not save or compare those. Between the end of backward
  /// and the return of Step also those that are landing.
  virtual std::vector<std::string> torn() const = 0;

  /// This worker has no more data: rounds after this go on without it. Later Steps fail.
  virtual absl::Status Leave() = 0;

  /// Facts of an owner's shard, for reports.
  struct ShardInfo {
    std::string owner;
    int64_t parameters = 0;    ///< Elements.
    uint64_t state_bytes = 0;  ///< Of optimizer state.
    int64_t steps = 0;         ///< Sync: rounds applied. Async: steps of all workers together.
  };
  virtual absl::StatusOr<std::vector<ShardInfo>> Shards() = 0;
};

/// CRC-32C over the bytes of all parameters in order: equal on two replicas exactly if their bits are (up to
/// collisions).
uint32_t Checksum(const NamedTensors& parameters);

}  // namespace Atoll::client
