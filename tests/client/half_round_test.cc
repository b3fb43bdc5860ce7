// Workers that die or go silent half way: between two owners, and between two chunks.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "atoll/base/clock.h"
#include "atoll/base/future.h"
#include "atoll/client/attach.h"
#include "atoll/client/parameters.h"
#include "trainer_fixture.h"

namespace Atoll::client {
namespace {

using testing::ElementsAre;

constexpr int64_t kElements = 64 << 10;  // Two chunks, each of one of two owners.

/// A worker of the model {"w": kElements} that sends what the test says, and no more.
class RawWorker {
 public:
  RawWorker(Session& session, const TrainerOptions& options) {
    auto parameters =
        ParameterSet::Create(NamedTensors({{"w", at::zeros({kElements}).requires_grad_(true)}}));
    shard_optim::ShardArguments arguments;
    arguments.model = options.name;
    arguments.worker_count = session.worker_count();
    arguments.layout.owners = session.node().launch().owners;
    arguments.layout.chunk_bytes = options.chunk_bytes;
    arguments.layout.small_parameter_bytes = options.small_parameter_bytes;
    arguments.parameters = parameters->specs();
    arguments.policy = options.policy;
    auto shards = ShardSet::Open(session, arguments, base::Now() + kHang);
    EXPECT_TRUE(shards.ok()) << shards.status();
    if (!shards.ok()) return;
    shards_ = *std::move(shards);
    auto registered = Register(*shards_, session.worker_index(), base::Now() + kHang);
    EXPECT_TRUE(registered.ok()) << registered.status();
  }
  /// `chunk` is also its owner's index. Waits for the answer.
  absl::Status Load(int chunk, float value) {
    shard_optim::Load request;
    request.chunk = chunk;
    base::Promise<int> done;
    std::vector<rpc::OutTensor> tensors;
    tensors.push_back(rpc::Lend(at::full({kElements / 2}, value), [] {}));
    shards_->Call<shard_optim::Load>(chunk, request, std::move(tensors), {}, [done](auto answer) {
      done.Set(answer.ok() ? absl::StatusOr<int>(0) : answer.status());
    });
    return done.future().Wait(kHang).status();
  }
  /// Waits for nothing: the answer would come after a landing.
  void Push(int64_t step, int chunk) {
    shard_optim::PushGradient request;
    request.step = step;
    request.chunk = chunk;
    request.optimizer = kAdam;
    request.defined = shard_optim::AllDefined(1);
    std::vector<rpc::OutTensor> tensors;
    tensors.push_back(rpc::Lend(at::ones({kElements / 2}), [] {}));
    shards_->Call<shard_optim::PushGradient>(chunk, request, std::move(tensors), {}, [](auto) {});
  }

 private:
  std::unique_ptr<ShardSet> shards_;
};

// Elements that began equal and have equal gradients are equal in whole parameters.
bool Whole(const at::Tensor& parameter) {
  return parameter.detach().eq(parameter.detach()[0]).all().item<bool>();
}

TEST_F(Trainers, AParameterOfTwoStepsIsTornUntilTheStepIsMadeAgain) {
  TrainingJob job(2, 2);
  const TrainerOptions options = OptionsOf(shard_optim::Sync{.round_limit = absl::Seconds(5)});
  at::Tensor parameter = at::zeros({kElements}).requires_grad_(true);
  std::unique_ptr<Trainer> trainer;
  std::unique_ptr<RawWorker> other;
  InParallel(2, [&](int w) {
    if (w == 0) trainer = AttachOrFail(job.worker(0), NamedTensors({{"w", parameter}}), options);
    if (w == 1) other = std::make_unique<RawWorker>(job.worker(1), options);
  });
  ASSERT_NE(trainer, nullptr);
  parameter.sum().backward();
  other->Push(1, 0);
  auto result = trainer->Step();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
  EXPECT_THAT(trainer->torn(), ElementsAre("w"));
  // The owners' own values are of two steps.
  const absl::Status refreshed = trainer->Refresh();
  ASSERT_TRUE(refreshed.ok()) << refreshed;
  EXPECT_FALSE(Whole(parameter));
  EXPECT_THAT(trainer->torn(), ElementsAre("w"));
  other->Push(1, 1);
  parameter.sum().backward();
  result = trainer->Step();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 1);
  EXPECT_TRUE(Whole(parameter));
  EXPECT_THAT(trainer->torn(), ElementsAre());
}

TEST_F(Trainers, AWorkerThatDiedWhileItLoadedIsReplaced) {
  TrainingJob job(2, 1);
  auto first = std::make_unique<RawWorker>(job.worker(0), OptionsOf());
  const absl::Status loaded = first->Load(0, 5.0f);
  ASSERT_TRUE(loaded.ok()) << loaded;
  job.CutOffWorker(0);
  first.reset();
  job.BuryWorker(0);
  const absl::Status restarted = job.RestartWorker(0);
  ASSERT_TRUE(restarted.ok()) << restarted;
  at::Tensor parameter = at::zeros({kElements}).requires_grad_(true);
  auto trainer = AttachOrFail(job.worker(0), NamedTensors({{"w", parameter}}));
  ASSERT_NE(trainer, nullptr);
  EXPECT_EQ(parameter[0].item<float>(), 5.0f) << "what an owner had counts";
  EXPECT_EQ(parameter[kElements - 1].item<float>(), 0.0f);
  EXPECT_THAT(trainer->torn(), ElementsAre());
  parameter.sum().backward();
  auto result = trainer->Step();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 1);
}

}  // namespace
}  // namespace Atoll::client
