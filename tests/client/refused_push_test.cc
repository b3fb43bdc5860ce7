// An owner that has no room for a gradient: it says so, and the worker sends it again later.
#include <memory>
#include <utility>

#include <gtest/gtest.h>

#include "trainer_fixture.h"

namespace Atoll::client {
namespace {

/// Counts what owners refused for want of room, before or after the bytes moved.
class Refusals {
 public:
  void Count(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    count_ += absl::IsResourceExhausted(status) ? 1 : 0;
  }
  bool WaitFor(int count) {
    absl::MutexLock lock(&mu_);
    auto there = [this, count]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return count_ >= count; };
    return mu_.AwaitWithTimeout(absl::Condition(&there), kHang);
  }

 private:
  absl::Mutex mu_;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
};

/// A shard whose refusals are counted.
class CountingShard : public rref::Object {
 public:
  CountingShard(std::shared_ptr<shard_optim::Shard> shard, Refusals* refusals)
      : shard_(std::move(shard)), refusals_(refusals) {}
  void Call(rpc::ServerCall call) override {
    call.responder = rpc::Responder::From([refusals = refusals_, responder = std::move(call.responder)](
                                              absl::StatusOr<rpc::Payload> reply) mutable {
      refusals->Count(reply.status());
      std::move(responder).Reply(std::move(reply));
    });
    shard_.Call(std::move(call));
  }
  absl::StatusOr<std::vector<at::Tensor>> Allocate(const base::MemberId& caller, const rpc::MethodId& method,
                                                   absl::string_view body,
                                                   absl::Span<const rpc::TensorMeta> metas) override {
    auto into = shard_.Allocate(caller, method, body, metas);
    refusals_->Count(into.status());
    return into;
  }
  void OnPeerGone(const base::MemberId& member, const absl::Status& reason) override {
    shard_.OnPeerGone(member, reason);
  }

 private:
  shard_optim::ShardObject shard_;
  Refusals* const refusals_;
};

/// Owners with room for one chunk that waits.
TrainingJobOptions OwnersWithoutRoom(Refusals* refusals) {
  TrainingJobOptions options;
  options.serve = [refusals](rref::ObjectSpace& objects, rpc::Agent& agent) {
    shard_optim::ShardEnvironment environment;
    environment.executor = agent.pool();
    environment.timer = agent.timer();
    environment.clock = agent.clock();
    environment.memory.staging_bytes = OptionsOf().chunk_bytes;
    return objects.RegisterClass(
        shard_optim::kShardClass,
        [environment, refusals](const base::MemberId& creator,
                                rpc::Received received) -> absl::StatusOr<std::shared_ptr<rref::Object>> {
          auto arguments = shard_optim::ShardArguments::Decode(received.body);
          if (!arguments.ok()) return arguments.status();
          auto shard = shard_optim::Shard::Create(*std::move(arguments), environment);
          if (!shard.ok()) return shard.status();
          return std::make_shared<CountingShard>(*std::move(shard), refusals);
        });
  };
  return options;
}

// The window: of everything, and of less than the owner refuses, where backward has to wait.
class RefusedPushes : public testing::TestWithParam<size_t> {};

TEST_P(RefusedPushes, AreSentAgainAndAppliedOnce) {
  constexpr int kSteps = 3;
  Refusals refusals;
  TrainingJob job(1, 2, OwnersWithoutRoom(&refusals));
  std::vector<SmallModel> models = {SmallModel(1), SmallModel(1)};
  InParallel(2, [&](int w) {
    at::set_num_threads(1);
    TrainerOptions options = OptionsOf();
    options.window_bytes = GetParam();
    auto trainer = AttachOrFail(job.worker(w), models[w].named(), options);
    ASSERT_NE(trainer, nullptr);
    // Worker 1's gradients wait for worker 0's, which come when some were refused more than once.
    if (w == 0) {
      EXPECT_TRUE(refusals.WaitFor(2 * SmallModel::kChunks));
    }
    TrainSteps(*trainer, models[w], w, kSteps,
               [](const StepResult& result) { EXPECT_EQ(result.contributors, 2); });
    auto shards = trainer->Shards();
    ASSERT_TRUE(shards.ok()) << shards.status();
    EXPECT_EQ(shards->at(0).steps, kSteps);
  });
  at::set_num_threads(1);
  SmallModel expected(1);
  LocalAdam adam(expected, kAdam);
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<at::Tensor> sum = GradientsOf(expected, TestBatch(step, 0));
    const std::vector<at::Tensor> other = GradientsOf(expected, TestBatch(step, 1));
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = (sum[i] + other[i]) / 2;
    adam.Step(sum);
  }
  ExpectSame(models[0], expected);
  ExpectSame(models[1], expected);
}
INSTANTIATE_TEST_SUITE_P(Window, RefusedPushes, testing::Values(size_t{32} << 20, size_t{256} << 10));

}  // namespace
}  // namespace Atoll::client
