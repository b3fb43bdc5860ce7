// A child of fork can use nothing of a whole rank: session, trainer, node and its parts. The parent goes on.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "../in_child.h"
#include "atoll/cluster/job_key.h"
#include "small_model.h"
#include "training_job.h"

namespace Atoll::client {
namespace {

using Atoll::testing::InChild;
using Atoll::testing::WrongInChild;

TrainerOptions OptionsOf() {
  TrainerOptions options;
  options.policy = shard_optim::Sync{.round_limit = kHang};
  options.attach_limit = kHang;
  return options;
}

class ForkTest : public ::testing::Test {
 protected:
  ForkTest() : job_(std::make_unique<TrainingJob>(1, 1)), model_(1) { at::set_num_threads(1); }

  void SetUp() override {
    auto trainer = Trainer::Attach(job_->worker(0), model_.named(), OptionsOf());
    ASSERT_TRUE(trainer.ok()) << trainer.status();
    trainer_ = *std::move(trainer);
    auto made = job_->worker(0).node().objects().Find("owner0", shard_optim::ShardName("model")).Wait(kHang);
    ASSERT_TRUE(made.ok()) << made.status();
    reference_ = *std::move(made);
  }

  void OneStep() {
    TestBatch batch(++steps_, 0);
    model_.Loss(batch.x, batch.target).backward();
    auto result = trainer_->Step();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->step, steps_);
  }

  std::string UseTrainer() {
    std::string wrong;
    TestBatch batch(1000, 0);
    model_.Loss(batch.x, batch.target).backward();
    wrong += WrongInChild(trainer_->Step().status(), "Step");
    wrong += WrongInChild(trainer_->Refresh(), "Refresh");
    wrong += WrongInChild(trainer_->Leave(), "Trainer::Leave");
    wrong += WrongInChild(trainer_->Shards().status(), "Shards");
    if (!trainer_->torn().empty()) wrong += "torn in a child";
    SmallModel other(2);
    wrong += WrongInChild(Trainer::Attach(job_->worker(0), other.named(), OptionsOf()).status(), "Attach");
    trainer_.reset();
    return wrong;
  }

  std::string UseNode() {
    std::string wrong;
    rref::Node& node = job_->worker(0).node();
    rref::ObjectSpace& objects = node.objects();
    wrong += WrongInChild(objects.RegisterClass("X", nullptr), "RegisterClass");
    wrong += WrongInChild(objects.Create("owner0", "X", {}).Wait(kHang).status(), "Create");
    wrong += WrongInChild(objects.Find("owner0", "x").Wait(kHang).status(), "Find");
    wrong += WrongInChild(objects.Unpin("x"), "Unpin");
    wrong += WrongInChild(objects.Local({}).status(), "Local");
    if (!objects.List().empty()) wrong += "objects in a child";
    objects.OnPeerGone(job_->owner(0).agent().self(), absl::OkStatus());
    int returned = 0;
    rpc::Payload request;
    request.tensors.push_back(rpc::Lend(at::zeros({4}), [&] { ++returned; }));
    wrong +=
        WrongInChild(reference_->Call({"shard.info"}, std::move(request)).Wait(kHang).status(), "RRef::Call");
    if (returned != 1) wrong += "a loan did not come back";
    wrong += WrongInChild(std::move(*reference_).Release().Wait(kHang).status(), "Release");
    reference_.reset();

    rpc::Membership& membership = node.membership();
    wrong += WrongInChild(membership.status(), "Membership::status");
    wrong += WrongInChild(membership.WaitForAll(kHang), "WaitForAll");
    wrong += WrongInChild(membership.Barrier("b", kHang), "Barrier");
    wrong += WrongInChild(membership.Leave(kHang), "Membership::Leave");
    bool told = false;
    membership.OnError([&](absl::Status error) { told = WrongInChild(error, "").empty(); });
    if (!told) wrong += "OnError does not say so";
    if (!membership.Members().empty()) wrong += "members in a child";
    wrong += WrongInChild(node.Stop(kHang), "Node::Stop");
    wrong += WrongInChild(job_->worker(0).Leave(kHang), "Session::Leave");
    if (job_->worker(0).active()) wrong += "an active session in a child";
    return wrong;
  }

  std::unique_ptr<TrainingJob> job_;
  SmallModel model_;
  std::unique_ptr<Trainer> trainer_;
  std::shared_ptr<rref::RRef> reference_;
  int steps_ = 0;
};

TEST_F(ForkTest, AChildIsToldSoAndTheTrainingGoesOn) {
  OneStep();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(InChild([this] {
                std::string wrong = UseTrainer() + UseNode();
                job_->BuryWorker(0);
                job_->BuryOwner(0);
                return wrong;
              }),
              0);
    OneStep();
  }
  auto reply = job_->worker(0).node().objects().Find("owner0", shard_optim::ShardName("model")).Wait(kHang);
  EXPECT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(trainer_->Leave().ok());
}

TEST_F(ForkTest, AForkInTheMiddleOfAStep) {
  ATOLL_SKIP_IF_A_BUSY_FORK_HANGS();
  TestBatch batch(++steps_, 0);
  model_.Loss(batch.x, batch.target).backward();
  EXPECT_EQ(InChild([this] { return UseTrainer(); }), 0);
  auto result = trainer_->Step();
  ASSERT_TRUE(result.ok()) << result.status();
  OneStep();
}

TEST(SharedKeyFileInAChildTest, StaysThere) {
  const std::string directory = ::testing::TempDir() + "/atoll-fork-" + std::to_string(getpid());
  auto file = cluster::SharedKeyFile::Open(directory, "fork-test");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::string path = (*file)->path();
  EXPECT_EQ(InChild([&]() -> std::string {
              file->reset();
              return "";
            }),
            0);
  EXPECT_EQ(access(path.c_str(), F_OK), 0);
  file->reset();
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_EQ(rmdir(directory.c_str()), 0);
}

}  // namespace
}  // namespace Atoll::client
