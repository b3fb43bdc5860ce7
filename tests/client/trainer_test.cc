#include "atoll/client/trainer.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include <ATen/ops/cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "trainer_fixture.h"

namespace Atoll::client {
namespace {

using shard_optim::Async;
using shard_optim::Sync;
using testing::HasSubstr;

// ---- What is computed ---------------------------------------------------------------------------------

class SyncParity : public testing::TestWithParam<int> {};

TEST_P(SyncParity, IsBitwiseTheHalvedSumInRankOrderAndNearTheWholeBatch) {
  constexpr int kSteps = 12;
  TrainingJob job(GetParam(), 2);
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(2)};  // Worker 0's values win.
  InParallel(2, [&](int w) {
    at::set_num_threads(1);
    auto trainer = AttachOrFail(job.worker(w), models[w].named());
    ASSERT_NE(trainer, nullptr);
    TrainSteps(*trainer, models[w], w, kSteps, [&](const StepResult& result) {
      EXPECT_EQ(result.contributors, 2);
      EXPECT_GE(result.bytes_sent, 4u * SmallModel::kElements);
      EXPECT_EQ(result.bytes_received, result.bytes_sent);
      for (auto& [name, tensor] : models[w].named()) EXPECT_FALSE(tensor.grad().defined()) << name;
    });
    EXPECT_TRUE(trainer->torn().empty());
    auto shards = trainer->Shards();
    ASSERT_TRUE(shards.ok()) << shards.status();
    ASSERT_EQ(shards->size(), static_cast<size_t>(GetParam()));
    int64_t elements = 0;
    for (const auto& shard : *shards) {
      elements += shard.parameters;
      EXPECT_EQ(shard.steps, kSteps);
      EXPECT_GE(shard.state_bytes, static_cast<uint64_t>(shard.parameters) * 8);
    }
    EXPECT_EQ(elements, SmallModel::kElements);
  });
  at::set_num_threads(1);
  SmallModel halves(1), whole(1);
  LocalAdam adam_of_halves(halves, kAdam), adam_of_whole(whole, kAdam);
  for (int step = 1; step <= kSteps; ++step) {
    TestBatch first(step, 0), second(step, 1);
    std::vector<at::Tensor> sum = GradientsOf(halves, first), other = GradientsOf(halves, second);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = (sum[i] + other[i]) / 2;
    adam_of_halves.Step(sum);
    TestBatch both = first;
    both.x = at::cat({first.x, second.x});
    both.target = at::cat({first.target, second.target});
    adam_of_whole.Step(GradientsOf(whole, both));
  }
  ExpectSame(models[0], halves);
  ExpectSame(models[1], halves);
  EXPECT_EQ(Checksum(models[0].named()), Checksum(models[1].named()));
  double difference = 0;
  for (size_t i = 0; i < whole.named().size(); ++i) {
    at::Tensor a = whole.named()[i].second.detach(), b = halves.named()[i].second.detach();
    difference = std::max(difference, (a - b).abs().max().item<double>());
  }
  EXPECT_LE(difference, 1e-6);
}
INSTANTIATE_TEST_SUITE_P(Owners, SyncParity, testing::Values(1, 2, 3));

TEST_F(Trainers, AsyncLearnsAndCountsEveryStep) {
  constexpr int kSteps = 60;
  TrainingJob job(2, 2);
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(1)};
  const TestBatch probe(1000, 0, 128);
  const double before = models[0].Loss(probe.x, probe.target).item<double>();
  InParallel(2, [&](int w) {
    at::set_num_threads(1);
    TrainerOptions options = OptionsOf(Async{});
    options.optimizer.lr = 1e-2;
    auto trainer = AttachOrFail(job.worker(w), models[w].named(), options);
    ASSERT_NE(trainer, nullptr);
    TrainSteps(*trainer, models[w], w, kSteps,
               [](const StepResult& result) { EXPECT_EQ(result.contributors, 1); });
    auto gathered = job.worker(w).node().membership().AllGather("done", "", kHang, {"worker0", "worker1"});
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    ASSERT_TRUE(trainer->Refresh().ok());
    if (w == 0) {
      auto shards = trainer->Shards();
      ASSERT_TRUE(shards.ok()) << shards.status();
      for (const auto& shard : *shards) EXPECT_EQ(shard.steps, 2 * kSteps) << shard.owner;
    }
  });
  ExpectSame(models[0], models[1]);
  EXPECT_LT(models[0].Loss(probe.x, probe.target).item<double>(), 0.7 * before);
}

TEST_F(Trainers, ParametersWithoutGradientStayOrCountAsZero) {
  TrainingJob job(2, 2);
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(1)};
  SmallModel first(1), expected(1);
  InParallel(2, [&](int w) {
    at::set_num_threads(1);
    auto trainer = AttachOrFail(job.worker(w), models[w].named());
    ASSERT_NE(trainer, nullptr);
    // w1 has a gradient on nobody, w2 and b2 on worker 0 alone, b3 on both.
    at::Tensor loss = models[w].b3.square().sum();
    if (w == 0) loss = loss + models[w].w2.square().sum() + models[w].b2.square().sum();
    loss.backward();
    auto result = trainer->Step();
    ASSERT_TRUE(result.ok()) << result.status();
    result = trainer->Step();  // Nobody has any.
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, 2);
  });
  ExpectSame(models[0], models[1]);
  for (const char* name : {"w1", "b1", "w3"}) {
    for (size_t i = 0; i < 6; ++i) {
      if (first.named()[i].first != name) continue;
      EXPECT_TRUE(models[0].named()[i].second.detach().equal(first.named()[i].second.detach())) << name;
    }
  }
  // Half of the one gradient, as the mean of it and zero.
  LocalAdam adam(expected, kAdam);
  std::vector<at::Tensor> gradients;
  for (auto& [name, tensor] : expected.named()) gradients.push_back(tensor.detach() * 2);
  gradients[2] = gradients[2] / 2;
  gradients[3] = gradients[3] / 2;
  adam.Step(gradients);
  EXPECT_TRUE(models[0].w2.detach().equal(expected.w2.detach()));
  EXPECT_TRUE(models[0].b2.detach().equal(expected.b2.detach()));
  EXPECT_TRUE(models[0].b3.detach().equal(expected.b3.detach()));
}

TEST_F(Trainers, GradientsSetByHandAreTaken) {
  TrainingJob job(1, 1);
  SmallModel model(1), expected(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  std::vector<at::Tensor> gradients;
  for (auto& [name, tensor] : model.named()) {
    gradients.push_back(tensor.detach() * 3);
    tensor.mutable_grad() = gradients.back().clone();
  }
  ASSERT_TRUE(trainer->Step().ok());
  LocalAdam(expected, kAdam).Step(gradients);
  ExpectSame(model, expected);
}

TEST_F(Trainers, AWindowSmallerThanAChunkOnlySlows) {
  TrainingJob job(2, 1);
  SmallModel model(1), expected(1);
  TrainerOptions options = OptionsOf();
  options.window_bytes = 1;
  auto trainer = AttachOrFail(job.worker(0), model.named(), options);
  ASSERT_NE(trainer, nullptr);
  LocalAdam adam(expected, kAdam);
  for (int step = 1; step <= 3; ++step) {
    const TestBatch batch(step, 0);
    ASSERT_TRUE(TrainOn(*trainer, model, batch).ok());
    adam.Step(GradientsOf(expected, batch));
  }
  ExpectSame(model, expected);
}

TEST_F(Trainers, TheLearningRateChangesFromTheNextStep) {
  TrainingJob job(1, 1);
  SmallModel model(1), expected(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  EXPECT_EQ(trainer->SetLearningRate(-1).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(trainer->SetLearningRate(0).ok());
  const TestBatch batch(1, 0);
  ASSERT_TRUE(TrainOn(*trainer, model, batch).ok());
  ExpectSame(model, expected);
}

// ---- Who takes part -----------------------------------------------------------------------------------

TEST_F(Trainers, AWorkerLeavesAndTheOtherGoesOn) {
  TrainingJob job(2, 2);
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(1)};
  std::vector<int> contributors;
  InParallel(2, [&](int w) {
    at::set_num_threads(1);
    auto trainer = AttachOrFail(job.worker(w), models[w].named());
    ASSERT_NE(trainer, nullptr);
    TrainSteps(*trainer, models[w], w, w == 0 ? 6 : 3, [&](const StepResult& result) {
      if (w == 0) contributors.push_back(result.contributors);
    });
    if (w == 1) {
      ASSERT_TRUE(trainer->Leave().ok());
      EXPECT_EQ(trainer->Step().status().code(), absl::StatusCode::kFailedPrecondition);
      TestBatch batch(9, 1);
      models[1].Loss(batch.x, batch.target).backward();  // Its gradients are its own again.
      EXPECT_TRUE(models[1].w1.grad().defined());
    }
  });
  EXPECT_EQ(contributors, (std::vector<int>{2, 2, 2, 1, 1, 1}));
}

TEST_F(Trainers, AKilledWorkersRoundGoesOnAndItsSuccessorJoins) {
  TrainingJob job(2, 2);
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(1)};
  std::vector<std::unique_ptr<Trainer>> trainers(2);
  InParallel(2, [&](int w) { trainers[w] = AttachOrFail(job.worker(w), models[w].named()); });
  ASSERT_TRUE(trainers[0] != nullptr && trainers[1] != nullptr);
  auto step = [&](int w, int number) {
    at::set_num_threads(1);
    return TrainOn(*trainers[w], models[w], TestBatch(number, w));
  };
  InParallel(2, [&](int w) { EXPECT_TRUE(step(w, 1).ok()); });
  job.CutOffWorker(1);
  auto alone = step(0, 2);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->contributors, 1);
  job.worker(1).Leave(absl::Milliseconds(10)).IgnoreError();
  trainers[1].reset();
  job.BuryWorker(1);

  // A new process of its name comes while worker 0 goes on, and takes part until it leaves.
  std::atomic<bool> done{false};
  std::vector<uint32_t> by_step(3, 0);
  int together = 0;
  SmallModel successor(7);
  std::vector<std::pair<int64_t, uint32_t>> seen;
  InParallel(2, [&](int w) {
    if (w == 0) {
      for (int number = 3; !done; ++number) {
        auto result = step(0, number);
        ASSERT_TRUE(result.ok()) << result.status();
        ASSERT_EQ(result->step, static_cast<int64_t>(by_step.size()));
        by_step.push_back(Checksum(models[0].named()));
        together += result->contributors == 2 ? 1 : 0;
      }
      return;
    }
    at::set_num_threads(1);
    absl::Status restarted = job.RestartWorker(1);
    EXPECT_TRUE(restarted.ok()) << restarted;
    if (restarted.ok()) {
      auto trainer = AttachOrFail(job.worker(1), successor.named());
      for (int i = 0; trainer != nullptr && i < 3; ++i) {
        const TestBatch batch(100 + i, 1);
        auto result = TrainOn(*trainer, successor, batch);
        EXPECT_TRUE(result.ok()) << result.status();
        if (!result.ok()) break;
        EXPECT_EQ(result->contributors, 2);
        seen.emplace_back(result->step, Checksum(successor.named()));
      }
    }
    done = true;
  });
  EXPECT_EQ(together, 3);
  ASSERT_EQ(seen.size(), 3u);
  for (auto& [number, checksum] : seen) {
    ASSERT_LT(number, static_cast<int64_t>(by_step.size()));
    EXPECT_EQ(by_step[number], checksum) << "step " << number;
  }
}

TEST_F(Trainers, AnOwnersDeathIsNamedAndSticks) {
  TrainingJob job(2, 1);
  SmallModel model(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  job.CutOffOwner(1);
  const TestBatch batch(1, 0);
  auto result = TrainOn(*trainer, model, batch);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("owner1"));
  result = trainer->Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("Refresh"));
  EXPECT_FALSE(trainer->Refresh().ok());
  trainer.reset();
  job.BuryOwner(1);
}

// ---- What is refused ----------------------------------------------------------------------------------

TEST_F(Trainers, DifferentModelsAreRefusedWithTheFirstDifference) {
  TrainingJob job(1, 2);
  std::vector<absl::Status> statuses(2);
  InParallel(2, [&](int w) {
    SmallModel model(1);
    if (w == 1) model.b2 = at::zeros({97}).requires_grad_(true);
    TrainerOptions options = OptionsOf();
    options.attach_limit = absl::Seconds(2);  // Whoever was first waits for the other in vain.
    statuses[w] = Trainer::Attach(job.worker(w), model.named(), options).status();
  });
  std::sort(statuses.begin(), statuses.end(), [](auto& a, auto& b) { return a.code() < b.code(); });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kInvalidArgument) << statuses[0];
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("'b2'"));
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("97"));
  EXPECT_EQ(statuses[1].code(), absl::StatusCode::kDeadlineExceeded) << statuses[1];
}

TEST_F(Trainers, DifferentLearningRatesAreRefusedAndMended) {
  TrainingJob job(1, 2);
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(1)};
  InParallel(2, [&](int w) {
    at::set_num_threads(1);
    auto trainer =
        AttachOrFail(job.worker(w), models[w].named(), OptionsOf(Sync{.round_limit = absl::Seconds(3)}));
    ASSERT_NE(trainer, nullptr);
    ASSERT_TRUE(trainer->SetLearningRate(w == 0 ? 0.01 : 0.02).ok());
    TestBatch batch(1, w);
    auto result = TrainOn(*trainer, models[w], batch);
    EXPECT_FALSE(result.ok());
    EXPECT_THAT(result.status().code(),
                testing::AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kDeadlineExceeded));
    EXPECT_TRUE(trainer->torn().empty());
    auto gathered = job.worker(w).node().membership().AllGather("failed", "", kHang, {"worker0", "worker1"});
    ASSERT_TRUE(gathered.ok()) << gathered.status();
    ASSERT_TRUE(trainer->SetLearningRate(0.01).ok());
    absl::Status refreshed = trainer->Refresh();
    ASSERT_TRUE(refreshed.ok()) << refreshed;
    result = TrainOn(*trainer, models[w], batch);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, 1);
    EXPECT_EQ(result->contributors, 2);
  });
  ExpectSame(models[0], models[1]);
}

TEST_F(Trainers, OneTensorOneTrainer) {
  TrainingJob job(1, 1);
  SmallModel model(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  TrainerOptions options = OptionsOf();
  options.name = "other";
  auto second = Trainer::Attach(job.worker(0), model.named(), options);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("'w1'"));
  SmallModel third(1);
  EXPECT_EQ(Trainer::Attach(job.worker(0), third.named(), OptionsOf()).status().code(),
            absl::StatusCode::kAlreadyExists);  // One of the name.
  // The first is unharmed; and when it is gone, another may come, to the same shards.
  const TestBatch batch(1, 0);
  ASSERT_TRUE(TrainOn(*trainer, model, batch).ok());
  trainer.reset();
  trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  auto result = TrainOn(*trainer, model, batch);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 2);
}

TEST_F(Trainers, TwoBackwardsAreRefusedAndTheNextStepIsFine) {
  TrainingJob job(1, 1);
  SmallModel model(1), expected(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  LocalAdam adam(expected, kAdam);
  TestBatch batch(1, 0), other(2, 0);
  model.Loss(batch.x, batch.target).backward();
  auto result = TrainOn(*trainer, model, other);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("second gradient"));
  adam.Step(GradientsOf(expected, batch));
  ExpectSame(model, expected);
  result = TrainOn(*trainer, model, other);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 2);
  adam.Step(GradientsOf(expected, other));
  ExpectSame(model, expected);
}

TEST_F(Trainers, ExchangedMemoryIsNoticedInTheStepOfItsBackward) {
  TrainingJob job(1, 1);
  SmallModel model(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  const TestBatch batch(1, 0);
  const at::Tensor attached = model.w2.detach();
  model.w2.set_data(attached.clone());
  auto result = TrainOn(*trainer, model, batch);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("'w2'"));
  model.w2.set_data(attached);
  result = TrainOn(*trainer, model, batch);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 2);
}

TEST_F(Trainers, ARoundLimitThatCannotTravelIsRefusedFirst) {
  TrainingJob job(1, 1);
  SmallModel model(1);
  auto trainer =
      Trainer::Attach(job.worker(0), model.named(), OptionsOf(Sync{.round_limit = absl::Microseconds(100)}));
  EXPECT_EQ(trainer.status().code(), absl::StatusCode::kInvalidArgument) << trainer.status();
  EXPECT_THAT(std::string(trainer.status().message()), HasSubstr("round_limit is 100us"));
}

TEST_F(Trainers, ABackwardThatThrewIsToldAndTheNextStepIsFine) {
  TrainingJob job(1, 1);
  SmallModel model(1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  TestBatch batch(1, 0);
  at::Tensor middle = at::relu(at::addmm(model.b1, batch.x, model.w1.t()));
  middle.register_hook([](at::Tensor gradient) -> at::Tensor { throw std::runtime_error("stop here"); });
  at::Tensor loss = at::addmm(model.b2, middle, model.w2.t()).square().sum();
  EXPECT_THROW(loss.backward(), std::exception);
  auto result = trainer->Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("w1"));
  result = TrainOn(*trainer, model, batch);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 2);
}

TEST_F(Trainers, AJobWithoutOwnersSaysSo) {
  TrainingJob job(0, 1);
  SmallModel model(1);
  auto trainer = Trainer::Attach(job.worker(0), model.named(), OptionsOf());
  EXPECT_EQ(trainer.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(trainer.status().message()), HasSubstr("no owners"));
}

TEST_F(Trainers, AfterTheSessionLeftAllIsRefused) {
  TrainingJob job(1, 1);
  SmallModel model(1);
  EXPECT_EQ(Session::Join(job.LaunchOf(0, 1)).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(job.worker(0).worker_index(), 0);
  EXPECT_EQ(job.worker(0).worker_count(), 1);
  auto trainer = AttachOrFail(job.worker(0), model.named());
  ASSERT_NE(trainer, nullptr);
  EXPECT_TRUE(job.worker(0).Leave(kHang).ok());
  EXPECT_EQ(trainer->Step().status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(trainer->Refresh().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(trainer->Shards().status().code(), absl::StatusCode::kFailedPrecondition);
  auto late = Trainer::Attach(job.worker(0), model.named(), OptionsOf());
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace Atoll::client
