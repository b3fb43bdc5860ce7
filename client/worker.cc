#include "atoll/client/worker.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include <torch/torch.h>

#include "absl/strings/str_cat.h"
#include "atoll/base/clock.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"

namespace Atoll::client {
namespace {

/// Collects what a report says, and says when one is due.
class Meter {
 public:
  Meter(const base::Clock& clock, absl::Duration every) : clock_(clock), every_(every), since_(clock.Now()) {}

  void Add(double loss, int64_t images, const StepResult& step) {
    loss_ += loss;
    ++steps_;
    images_ += images;
    bytes_ += step.bytes_sent + step.bytes_received;
  }
  bool Due() const { return clock_.Now() - since_ >= every_; }
  /// Fills in the rates and begins anew.
  void Take(WorkerProgress* progress) {
    const double seconds = std::max(1e-6, absl::ToDoubleSeconds(clock_.Now() - since_));
    progress->loss = loss_ / static_cast<double>(std::max<int64_t>(1, steps_));
    progress->images_per_second = static_cast<double>(images_) / seconds;
    progress->bytes_per_second = static_cast<double>(bytes_) / seconds;
    loss_ = 0, steps_ = 0, images_ = 0, bytes_ = 0;
    since_ = clock_.Now();
  }

 private:
  const base::Clock& clock_;
  const absl::Duration every_;
  absl::Time since_;
  double loss_ = 0;
  int64_t steps_ = 0;
  int64_t images_ = 0;
  uint64_t bytes_ = 0;
};

/// One run of the loop.
class Loop {
 public:
  Loop(Session& session, const Data& data, Model& model, const WorkerOptions& options, Trainer& trainer)
      : options_(options),
        data_(data),
        model_(model),
        trainer_(trainer),
        worker_(session.worker_index()),
        workers_(session.worker_count()),
        meter_(clock_, options.report_every) {
    steps_ = EpochPlan::Steps(data.train.size(), options.batch, workers_) * options.epochs;
    if (options.max_steps > 0) steps_ = std::min(steps_, options.max_steps);
    summary_.fewest_contributors = workers_;
  }

  absl::Status Run(const std::function<bool()>& stop,
                   const std::function<void(const WorkerProgress&)>& on_progress) {
    const absl::Time begin = clock_.Now();
    for (int64_t epoch = 0; epoch < options_.epochs && summary_.steps < steps_ && !summary_.stopped;
         ++epoch) {
      ATOLL_RETURN_IF_ERROR(RunEpoch(epoch, stop, on_progress));
    }
    summary_.seconds = absl::ToDoubleSeconds(clock_.Now() - begin);
    return absl::OkStatus();
  }
  WorkerSummary TakeSummary() { return std::move(summary_); }

 private:
  absl::Status RunEpoch(int64_t epoch, const std::function<bool()>& stop,
                        const std::function<void(const WorkerProgress&)>& on_progress) {
    const EpochPlan plan({.count = data_.train.size(),
                          .batch = options_.batch,
                          .worker = worker_,
                          .workers = workers_,
                          .seed = options_.seed,
                          .epoch = epoch});
    WorkerProgress progress;
    progress.epoch = epoch + 1;
    progress.epochs = options_.epochs;
    progress.steps = steps_;
    double loss_sum = 0;
    int64_t step = 0;
    for (bool last = false; !last; ++step) {
      ATOLL_ASSIGN_OR_RETURN(const double loss, RunStep(plan.Indices(step), &progress));
      loss_sum += loss;
      summary_.stopped = stop();
      last = step + 1 == plan.steps() || summary_.steps == steps_ || summary_.stopped;
      progress.end_of_epoch = last;
      progress.epoch_loss = loss_sum / static_cast<double>(step + 1);
      if (last || meter_.Due()) {
        progress.step = summary_.steps;
        meter_.Take(&progress);
        on_progress(progress);
      }
    }
    summary_.loss = loss_sum / static_cast<double>(step);
    return absl::OkStatus();
  }

  /// The mean loss of these images, with its gradients, in as many parts as asked for.
  double Backward(const at::Tensor& indices) {
    const int64_t images = indices.numel(), parts = std::min(options_.accumulate, images);
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) {
      std::optional<AccumulationScope> scope;
      if (part + 1 < parts) scope.emplace(trainer_.Accumulate());
      const int64_t begin = images * part / parts, end = images * (part + 1) / parts;
      const Batch batch = TakeBatch(data_, data_.train, indices.slice(0, begin, end));
      at::Tensor loss = torch::cross_entropy_loss(model_.Forward(batch.images), batch.labels);
      if (parts > 1) loss = loss * (static_cast<double>(end - begin) / static_cast<double>(images));
      loss.backward();
      sum += loss.item<double>();
    }
    return sum;
  }

  absl::StatusOr<double> RunStep(const at::Tensor& indices, WorkerProgress* progress) {
    if (options_.decay == LearningRateDecay::kLinear) {
      const double left = static_cast<double>(steps_ - summary_.steps) / static_cast<double>(steps_);
      ATOLL_RETURN_IF_ERROR(trainer_.SetLearningRate(options_.adam.lr * left));
    }
    double loss_value = 0;
    try {
      loss_value = Backward(indices);
    } catch (...) {
      return absl::InternalError(
          absl::StrCat("step ", summary_.steps + 1, ": the model failed: ", rpc::ExceptionText()));
    }
    ATOLL_ASSIGN_OR_RETURN(const StepResult result, trainer_.Step());
    ++summary_.steps;
    summary_.images += indices.numel();
    summary_.bytes_sent += result.bytes_sent;
    summary_.bytes_received += result.bytes_received;
    summary_.fewest_contributors = std::min(summary_.fewest_contributors, result.contributors);
    progress->contributors = result.contributors;
    meter_.Add(loss_value, indices.numel(), result);
    if (!std::isfinite(loss_value)) {
      return absl::OutOfRangeError(absl::StrCat("step ", summary_.steps, ": the loss is ", loss_value,
                                                ": the learning rate ", options_.adam.lr,
                                                " may be too high"));
    }
    return loss_value;
  }

  const WorkerOptions& options_;
  const Data& data_;
  Model& model_;
  Trainer& trainer_;
  const int worker_;
  const int workers_;
  const base::RealClock clock_;
  Meter meter_;
  int64_t steps_ = 0;
  WorkerSummary summary_;
};

}  // namespace

absl::Status Validate(const WorkerOptions& options) {
  const auto range = [](absl::string_view what, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is ", value, ": it should be from ", low, " to ", high));
  };
  ATOLL_RETURN_IF_ERROR(range("epochs", options.epochs, 1, 1000000));
  ATOLL_RETURN_IF_ERROR(range("batch", options.batch, 1, 1000000));
  ATOLL_RETURN_IF_ERROR(range("accumulate", options.accumulate, 1, 1000000));
  ATOLL_RETURN_IF_ERROR(range("max_steps", options.max_steps, 0, int64_t{1} << 40));
  if (options.attach_limit < absl::Seconds(1) || options.attach_limit > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attach_limit is ", absl::FormatDuration(options.attach_limit), ": it should be from 1 s to 24 h"));
  }
  ATOLL_RETURN_IF_ERROR(shard_optim::Validate(options.policy));
  return shard_optim::Validate(options.adam);
}

absl::StatusOr<WorkerSummary> RunWorker(Session& session, const Data& data, Model& model,
                                        const WorkerOptions& options, const std::function<bool()>& stop,
                                        const std::function<void(const WorkerProgress&)>& on_progress) {
  ATOLL_RETURN_IF_ERROR(Validate(options));
  if (EpochPlan::Steps(data.train.size(), options.batch, session.worker_count()) == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the data set ", data.name, " has ", data.train.size(),
                                                   " training images, fewer than the ",
                                                   session.worker_count(), " workers"));
  }
  TrainerOptions trainer_options;
  trainer_options.optimizer = options.adam;
  trainer_options.policy = options.policy;
  trainer_options.attach_limit = options.attach_limit;
  ATOLL_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                         Trainer::Attach(session, model.parameters(), trainer_options));
  Loop loop(session, data, model, options, *trainer);
  ATOLL_RETURN_IF_ERROR(loop.Run(stop, on_progress));
  // In async others may have pushed since our last step: take the values as they are now.
  if (std::holds_alternative<shard_optim::Async>(options.policy)) ATOLL_RETURN_IF_ERROR(trainer->Refresh());
  WorkerSummary summary = loop.TakeSummary();
  ATOLL_ASSIGN_OR_RETURN(summary.shards, trainer->Shards());
  ATOLL_RETURN_IF_ERROR(trainer->Leave());

  summary.name = session.node().launch().name;
  for (const auto& [_, tensor] : model.parameters().items()) summary.parameters += tensor.numel();
  summary.checksum = Checksum(model.parameters());
  if (options.evaluate && !summary.stopped && session.worker_index() == 0) {
    try {
      summary.accuracy = Accuracy(model, data, data.test);
    } catch (...) {
      return absl::InternalError(absl::StrCat("the model failed on the test images: ", rpc::ExceptionText()));
    }
  }
  return summary;
}

}  // namespace Atoll::client
