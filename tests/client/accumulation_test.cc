// Several backwards for one step.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "atoll/client/worker.h"
#include "live_python.h"
#include "trainer_fixture.h"

namespace Atoll::client {
namespace {

using testing::HasSubstr;
constexpr auto kFailedPrecondition = absl::StatusCode::kFailedPrecondition;

// ---- Against torch in Python --------------------------------------------------------------------------

const std::vector<std::vector<int64_t>> kSizes = {{3}, {65}, {31, 33}, {7}, {20000}};
constexpr int kSteps = 8;
int Backwards(int step) { return step % 4 + 1; }
bool Used(int step, int backward, int parameter) {
  if (parameter == 1) return backward + 1 < Backwards(step);
  if (parameter == 2) return backward + 1 == Backwards(step);
  return parameter != 3 || step % 3 != 0;
}

/// A run of record_accumulation.py.
struct Recording {
  std::vector<at::Tensor> start, end;
  std::vector<std::vector<std::vector<std::vector<at::Tensor>>>> factors;  // By step, worker, backward.
};

std::vector<at::Tensor> ReadAll(std::ifstream& in) {
  std::vector<at::Tensor> tensors;
  for (const auto& sizes : kSizes) {
    tensors.push_back(at::zeros(sizes));
    in.read(static_cast<char*>(tensors.back().data_ptr()), static_cast<int64_t>(tensors.back().nbytes()));
  }
  return tensors;
}

Recording Record(int workers) {
  const std::string path = absl::StrCat(testing::TempDir(), "atoll_accumulation_", getpid(), ".bin");
  EXPECT_EQ(
      shard_optim::RunPython({ATOLL_TEST_FOLDER "/record_accumulation.py", path, std::to_string(workers)}),
      0);
  std::ifstream in(path, std::ios::binary);
  Recording recording;
  recording.start = ReadAll(in);
  recording.factors.resize(kSteps);
  for (int step = 1; step <= kSteps; ++step) {
    recording.factors[step - 1].resize(workers);
    for (auto& worker : recording.factors[step - 1]) {
      for (int backward = 0; backward < Backwards(step); ++backward) worker.push_back(ReadAll(in));
    }
  }
  recording.end = ReadAll(in);
  EXPECT_TRUE(in.good() && in.peek() == EOF) << path << " has another size than expected";
  std::filesystem::remove(path);
  return recording;
}

class AccumulationParity : public testing::TestWithParam<int> {};

TEST_P(AccumulationParity, IsBitwiseTorchs) {
  ATOLL_NEEDS_PYTHON();
  const int workers = GetParam();
  const Recording recording = Record(workers);
  TrainingJob job(2, workers);
  InParallel(workers, [&](int w) {
    at::set_num_threads(1);
    std::vector<std::pair<std::string, at::Tensor>> named;
    for (size_t i = 0; i < kSizes.size(); ++i) {
      named.emplace_back(absl::StrCat("p", i), recording.start[i].clone().requires_grad_(true));
    }
    TrainerOptions options = OptionsOf();
    options.optimizer = {.lr = 1e-2, .weight_decay = 0.01};
    options.chunk_bytes = 16 << 10;
    options.small_parameter_bytes = 4 << 10;
    auto trainer = AttachOrFail(job.worker(w), named, options);
    ASSERT_NE(trainer, nullptr);
    for (int step = 1; step <= kSteps; ++step) {
      const int backwards = Backwards(step);
      for (int backward = 0; backward < backwards; ++backward) {
        std::optional<AccumulationScope> scope;
        if (backward + 1 < backwards) scope.emplace(trainer->Accumulate());
        at::Tensor loss;
        for (size_t i = 0; i < named.size(); ++i) {
          if (!Used(step, backward, static_cast<int>(i))) continue;
          const at::Tensor& value = named[i].second;
          at::Tensor term = (value * value * recording.factors[step - 1][w][backward][i]).sum();
          loss = loss.defined() ? loss + term : term;
        }
        loss.backward();
      }
      auto result = trainer->Step();
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->contributors, workers);
      for (auto& [name, tensor] : named) EXPECT_FALSE(tensor.grad().defined()) << name;
    }
    for (size_t i = 0; i < named.size(); ++i) {
      EXPECT_TRUE(named[i].second.detach().equal(recording.end[i])) << "worker " << w << ", p" << i;
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Workers, AccumulationParity, testing::Values(1, 2));

// ---- What else may be done ----------------------------------------------------------------------------

/// One worker and owner, a model, and the same model trained here.
class Accumulation : public Trainers {
 protected:
  void SetUp() override {
    Trainers::SetUp();
    trainer_ = AttachOrFail(job_.worker(0), model_.named());
    ASSERT_NE(trainer_, nullptr);
  }
  void Backward(int number) {
    const TestBatch batch(number, 0);
    model_.Loss(batch.x, batch.target).backward();
  }
  void ExpectStep(int number) {
    auto result = trainer_->Step();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, number);
  }
  void ExpectRefused(const std::string& what) {
    const absl::Status status = trainer_->Step().status();
    EXPECT_EQ(status.code(), kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }
  /// A step of the model here on the sum of the batches' gradients.
  void ExpectSums(const std::vector<int>& numbers) {
    std::vector<at::Tensor> gradients;
    for (int number : numbers) {
      const TestBatch batch(number, 0);
      expected_.Loss(batch.x, batch.target).backward();
    }
    for (auto& [name, tensor] : expected_.named()) {
      gradients.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
    }
    adam_.Step(gradients);
    ExpectSame(model_, expected_);
  }

  TrainingJob job_{1, 1};
  SmallModel model_{1}, expected_{1};
  LocalAdam adam_{expected_, kAdam};
  std::unique_ptr<Trainer> trainer_;
};

TEST_F(Accumulation, ScopesMayLieInEachOtherAndHoldSeveralBackwards) {
  {
    AccumulationScope outer = trainer_->Accumulate();
    Backward(1);
    {
      AccumulationScope inner = trainer_->Accumulate();
      Backward(2);
    }
    Backward(3);
    EXPECT_TRUE(model_.w1.grad().defined());
  }
  { AccumulationScope empty = trainer_->Accumulate(); }
  Backward(4);
  EXPECT_FALSE(model_.w1.grad().defined()) << "handed over from its hook";
  ExpectStep(1);
  ExpectSums({1, 2, 3, 4});
  Backward(5);
  ExpectStep(2);
  ExpectSums({5});
}

TEST_F(Accumulation, StepIsRefusedWhileAScopeIsOpenAndNothingIsLost) {
  std::optional<AccumulationScope> scope = trainer_->Accumulate();
  Backward(1);
  ExpectRefused("scope is open");
  scope.reset();
  Backward(2);
  scope.emplace(trainer_->Accumulate());
  ExpectRefused("scope is open");
  scope.reset();
  ExpectStep(1);
  ExpectSums({1, 2});
}

TEST_F(Accumulation, StepIsRefusedWithoutABackwardBehindTheScopeAndNothingIsLost) {
  {
    AccumulationScope scope = trainer_->Accumulate();
    Backward(1);
  }
  ExpectRefused("the last backward comes after the scope's end");
  ExpectRefused("the last backward comes after the scope's end");
  Backward(2);
  ExpectStep(1);
  ExpectSums({1, 2});
}

TEST_F(Accumulation, ClearedGradientsAreForgotten) {
  {
    AccumulationScope scope = trainer_->Accumulate();
    Backward(1);
  }
  for (auto& [name, tensor] : model_.named()) tensor.mutable_grad().reset();
  ExpectStep(1);  // Without any gradient.
  ExpectSame(model_, expected_);
}

TEST_F(Accumulation, ABackwardInAScopeAfterGradientsLeftIsTold) {
  Backward(1);
  {
    AccumulationScope scope = trainer_->Accumulate();
    const TestBatch batch(2, 0);
    model_.b3.sum().backward();
  }
  EXPECT_FALSE(model_.b3.grad().defined());
  ExpectRefused("'b3' had a second gradient before step 1");
  ExpectSums({1});
  Backward(2);
  ExpectStep(2);
  ExpectSums({2});
}

// A loss whose backward throws once b3 and w3 have their gradients.
at::Tensor ThrowingLoss(const SmallModel& model, const TestBatch& batch) {
  at::Tensor h = at::relu(at::addmm(model.b1, batch.x, model.w1.t()));
  h = at::relu(at::addmm(model.b2, h, model.w2.t()));
  h.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("stop here"); });
  return at::cross_entropy_loss(at::addmm(model.b3, h, model.w3.t()), batch.target);
}

TEST_F(Accumulation, ABackwardThatThrewInAScopeClosesItAndIsTold) {
  auto accumulate = [&] {
    AccumulationScope scope = trainer_->Accumulate();
    Backward(1);
    ThrowingLoss(model_, TestBatch(2, 0)).backward();
  };
  EXPECT_THROW(accumulate(), std::exception);
  Backward(3);
  const absl::Status told = trainer_->Step().status();
  EXPECT_EQ(told.code(), absl::StatusCode::kAborted) << told;
  EXPECT_THAT(std::string(told.message()), HasSubstr("in an accumulation scope of step 1"));
  Backward(4);
  ExpectStep(2);

  // Whoever clears the gradients begins anew.
  EXPECT_THROW(accumulate(), std::exception);
  for (auto& [name, tensor] : model_.named()) tensor.mutable_grad().reset();
  {
    AccumulationScope scope = trainer_->Accumulate();
    Backward(5);
  }
  Backward(6);
  ExpectStep(3);
}

TEST_F(Trainers, AWorkersBatchInPartsTrainsAlike) {
  const auto data = LoadData("synthetic:200");
  ASSERT_TRUE(data.ok()) << data.status();
  std::vector<std::unique_ptr<Model>> models;
  std::vector<WorkerSummary> summaries;
  for (int64_t parts : {1, 3}) {
    TrainingJob job(1, 1);
    models.push_back(*MakeModel("linear", ShapeOf(*data), 1));
    WorkerOptions options;
    options.batch = 32;  // Not a multiple of the parts.
    options.accumulate = parts;
    options.max_steps = 5;
    auto summary = RunWorker(
        job.worker(0), *data, *models.back(), options, [] { return false; }, [](const WorkerProgress&) {});
    ASSERT_TRUE(summary.ok()) << summary.status();
    summaries.push_back(*std::move(summary));
  }
  EXPECT_EQ(summaries[0].images, summaries[1].images);
  EXPECT_EQ(summaries[0].bytes_sent, summaries[1].bytes_sent) << "one push a step";
  EXPECT_NEAR(summaries[0].loss, summaries[1].loss, 1e-4);
  const auto whole = models[0]->parameters().items(), parted = models[1]->parameters().items();
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_LT((whole[i].second - parted[i].second).abs().max().item<double>(), 1e-4) << whole[i].first;
  }
}

TEST_F(Accumulation, AScopeMayOutliveItsTrainer) {
  AccumulationScope scope = trainer_->Accumulate();
  Backward(1);
  trainer_.reset();
}

}  // namespace
}  // namespace Atoll::client
