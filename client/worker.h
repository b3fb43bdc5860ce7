// The training loop of the program atoll-worker: a model and data by name, trained with the job's owners.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "atoll/client/data.h"
#include "atoll/client/models.h"
#include "atoll/client/session.h"
#include "atoll/client/trainer.h"

namespace Atoll::client {

enum class LearningRateDecay {
  kNone,
  kLinear,  ///< From lr at the first step towards 0 after the last.
};

struct WorkerOptions {
  int64_t epochs = 4;
  int64_t batch = 64;      ///< Images a step of this worker; in sync a step is of batch x workers.
  int64_t accumulate = 1;  ///< Backwards a step, each of a part of the batch: less memory, the same mean.
  int64_t max_steps = 0;   ///< Ends after so many steps; 0: after `epochs`.
  shard_optim::AdamOptions adam;
  LearningRateDecay decay = LearningRateDecay::kNone;
  shard_optim::Policy policy = shard_optim::Sync{};
  absl::Duration attach_limit = TrainerOptions().attach_limit;
  uint64_t seed = 1;     ///< Of the order of the images.
  bool evaluate = true;  ///< Worker 0 measures the accuracy at the end.
  absl::Duration report_every = absl::Seconds(1);
};
/// InvalidArgument names the value and its range.
absl::Status Validate(const WorkerOptions& options);

/// How far it is. Rates are of this worker, since the last report.
struct WorkerProgress {
  int64_t epoch = 0;  ///< From 1.
  int64_t epochs = 0;
  int64_t step = 0;   ///< Of this worker, from 1, over all epochs.
  int64_t steps = 0;  ///< In all.
  double loss = 0;    ///< Mean over the steps since the last report.
  double images_per_second = 0;
  double bytes_per_second = 0;  ///< Of tensors, sent and received.
  int contributors = 0;         ///< Of the last step.
  bool end_of_epoch = false;
  double epoch_loss = 0;  ///< Mean over the epoch's steps, where it ends.
};

struct WorkerSummary {
  std::string name;
  int64_t steps = 0;
  int64_t images = 0;
  int64_t parameters = 0;
  double seconds = 0;              ///< Of training, from the first batch to the last step.
  double loss = 0;                 ///< Mean over the last epoch's steps.
  std::optional<double> accuracy;  ///< On the test images, as a fraction. Worker 0 alone.
  uint32_t checksum = 0;           ///< Of all parameters, after the last step.
  uint64_t bytes_sent = 0;         ///< Of tensors.
  uint64_t bytes_received = 0;
  int fewest_contributors = 0;  ///< In any step.
  bool stopped = false;         ///< `stop` ended it before the last step.
  std::vector<Trainer::ShardInfo> shards;
};

/// Attaches `model`, trains, leaves the roster (not the session). `stop` is asked after every step: true
/// ends in order. `on_progress` is called about every report_every and at the end of each epoch. Errors are
/// those of Attach and Step.
absl::StatusOr<WorkerSummary> RunWorker(Session& session, const Data& data, Model& model,
                                        const WorkerOptions& options, const std::function<bool()>& stop,
                                        const std::function<void(const WorkerProgress&)>& on_progress);

}  // namespace Atoll::client
