// What tests of the trainer share: options under which a step takes several messages, and checked steps.
#pragma once

#include <memory>
#include <utility>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "small_model.h"
#include "training_job.h"

namespace Atoll::client {

// eps above the rounding of gradients (about 1e-9 here): below it Adam makes a whole step of a sign that
// rounding decided, and no sum of halves stays near the whole batch.
inline constexpr shard_optim::AdamOptions kAdam{.lr = 1e-3, .eps = 1e-5, .weight_decay = 0.01};

inline TrainerOptions OptionsOf(shard_optim::Policy policy = shard_optim::Sync{.round_limit = kHang}) {
  TrainerOptions options;
  options.optimizer = kAdam;
  options.policy = policy;
  options.chunk_bytes = 128 << 10;
  options.small_parameter_bytes = 64 << 10;
  options.attach_limit = kHang;
  return options;
}

inline void ExpectSame(const SmallModel& a, const SmallModel& b) {
  auto left = a.named(), right = b.named();
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(left[i].second.detach().equal(right[i].second.detach())) << left[i].first;
  }
}

/// Null after an error, which fails the test.
inline std::unique_ptr<Trainer> AttachOrFail(Session& session, NamedTensors parameters,
                                             TrainerOptions options = OptionsOf()) {
  auto trainer = Trainer::Attach(session, std::move(parameters), std::move(options));
  EXPECT_TRUE(trainer.ok()) << trainer.status();
  return trainer.ok() ? *std::move(trainer) : nullptr;
}

/// One backward and its step.
inline absl::StatusOr<StepResult> TrainOn(Trainer& trainer, const SmallModel& model, const TestBatch& batch) {
  model.Loss(batch.x, batch.target).backward();
  return trainer.Step();
}

/// The same for steps 1 .. `steps` of worker `part`, all of which should succeed; each result goes to `check`.
template <class Check>
void TrainSteps(Trainer& trainer, const SmallModel& model, int part, int steps, Check check) {
  for (int step = 1; step <= steps; ++step) {
    auto result = TrainOn(trainer, model, TestBatch(step, part));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, step);
    check(*result);
  }
}

class Trainers : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

}  // namespace Atoll::client
