// The connection ends, or stands still, in the middle of an owner's new values.
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "relay.h"
#include "trainer_fixture.h"

namespace Atoll::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// One parameter, of which each of two owners holds one chunk of 4 MiB; owner 1's values pass through a relay.
class TornLanding : public Trainers {
 protected:
  static constexpr int64_t kElements = 2 << 20;
  static constexpr int64_t kPassed = 1 << 20;  // Bytes of owner 1's 4 MiB: those and no more.

  void SetUp() override {
    Trainers::SetUp();
    const rpc::Agent& owner = job_.owner(1).agent();
    relay_.emplace(job_.owner(1).agent().endpoint()->port());
    job_.worker(0).node().agent().AddPeer({owner.self(), {absl::StrCat("127.0.0.1:", relay_->port())}});
    options_.chunk_bytes = 4 << 20;
    parameter_ = at::zeros({kElements}).requires_grad_(true);
  }
  // A whole first step, and then the backward of one whose landing will be held in the middle.
  void Begin() {
    trainer_ = AttachOrFail(job_.worker(0), NamedTensors({{"w", parameter_}}), options_);
    ASSERT_NE(trainer_, nullptr);
    parameter_.sum().backward();
    auto result = trainer_->Step();
    ASSERT_TRUE(result.ok()) << result.status();
    old_ = parameter_.detach().clone();
    relay_->HoldAfter(kPassed);
    parameter_.sum().backward();
  }
  /// Of the half that owner 1 holds.
  bool SecondHalfIs(const at::Tensor& values) const {
    return parameter_.detach()
        .narrow(0, kElements / 2, kElements / 2)
        .equal(values.narrow(0, kElements / 2, kElements / 2));
  }
  // Equal elements with equal gradients stay equal: another value shows a place that was left out.
  bool Whole() const { return parameter_.detach().eq(parameter_.detach()[0]).all().item<bool>(); }
  void ExpectTornAndRefused() {
    EXPECT_THAT(trainer_->torn(), ElementsAre("w"));
    // What the relay passed on may still be on its way into the parameter.
    for (const absl::Time end = base::Now() + kHang; SecondHalfIs(old_) && base::Now() < end;) {
      std::this_thread::yield();
    }
    EXPECT_FALSE(Whole());
    EXPECT_FALSE(SecondHalfIs(old_)) << "nothing had landed";
    parameter_.sum().backward();  // A loop that goes on in spite of the error.
    const absl::Status refused = trainer_->Step().status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.message()), HasSubstr("half a value: w"));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("Refresh()"));
  }

  static TrainingJobOptions OverTcpAlone() {
    TrainingJobOptions options;
    options.endpoint.enable_unix = false;
    options.endpoint.enable_cma = false;
    return options;
  }
  TrainingJob job_{2, 1, OverTcpAlone()};
  std::optional<Relay> relay_;
  TrainerOptions options_ = OptionsOf();
  at::Tensor parameter_, old_;
  std::unique_ptr<Trainer> trainer_;
};

TEST_F(TornLanding, ACutConnectionIsMadeAgainAndTheValueComesWhole) {
  Begin();
  std::thread cutter([&] {
    EXPECT_TRUE(relay_->WaitHeld(kHang));
    relay_->Cut();
  });
  auto result = trainer_->Step();
  cutter.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 2);
  EXPECT_THAT(trainer_->torn(), ElementsAre());
  EXPECT_TRUE(Whole());
  EXPECT_FALSE(SecondHalfIs(old_));
}

TEST_F(TornLanding, AnOwnerThatDiesInTheMiddleLeavesItTornForGood) {
  Begin();
  std::thread killer([&] {
    EXPECT_TRUE(relay_->WaitHeld(kHang));
    job_.CutOffOwner(1);
    relay_->Cut();
  });
  auto result = trainer_->Step();
  killer.join();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("owner1"));
  ExpectTornAndRefused();
  EXPECT_FALSE(trainer_->Refresh().ok());
  EXPECT_THAT(trainer_->torn(), ElementsAre("w"));
  trainer_.reset();
  job_.BuryOwner(1);
}

TEST_F(TornLanding, WhatStandsStillIsTornUntilRefresh) {
  options_.policy = shard_optim::Sync{.round_limit = absl::Seconds(5)};
  options_.answer_margin = absl::Seconds(1);
  Begin();
  auto result = trainer_->Step();  // Gives up; the landing is still in the middle.
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("owner1"));
  ASSERT_TRUE(relay_->WaitHeld(kHang));
  ExpectTornAndRefused();
  relay_->Cut();
  const absl::Status refreshed = trainer_->Refresh();
  ASSERT_TRUE(refreshed.ok()) << refreshed;
  EXPECT_THAT(trainer_->torn(), ElementsAre());
  EXPECT_TRUE(Whole());
  EXPECT_FALSE(SecondHalfIs(old_)) << "the step was made";
  parameter_.sum().backward();
  result = trainer_->Step();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 3);
  EXPECT_TRUE(Whole());
}

TEST_F(TornLanding, TheTrainersEndWaitsForIt) {
  options_.leave_limit = options_.answer_margin = kHang;
  Begin();
  ASSERT_TRUE(relay_->WaitHeld(kHang));
  std::thread cutter([&] { relay_->Cut(); });
  trainer_.reset();
  EXPECT_TRUE(Whole());
  EXPECT_FALSE(SecondHalfIs(old_));
  cutter.join();
}

// Small enough for owner 1 alone: owner 0 has nothing of it, and counts no steps.
TEST_F(TornLanding, AnAsyncStepIsCountedOnBesideAnOwnerOfNothing) {
  options_.policy = shard_optim::Async{};
  options_.async_limit = absl::Seconds(5);
  options_.answer_margin = absl::Seconds(1);
  parameter_ = at::zeros({64}).requires_grad_(true);
  trainer_ = AttachOrFail(job_.worker(0), NamedTensors({{"w", parameter_}}), options_);
  ASSERT_NE(trainer_, nullptr);
  for (int step = 1; step <= 2; ++step) {
    parameter_.sum().backward();
    auto result = trainer_->Step();
    ASSERT_TRUE(result.ok()) << result.status();
  }
  relay_->HoldAfter(0);
  parameter_.sum().backward();
  EXPECT_EQ(trainer_->Step().status().code(), absl::StatusCode::kDeadlineExceeded);
  relay_->Cut();
  const absl::Status refreshed = trainer_->Refresh();
  ASSERT_TRUE(refreshed.ok()) << refreshed;
  parameter_.sum().backward();
  auto result = trainer_->Step();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->step, 4) << "step 3 was made, though its values were late";
  auto shards = trainer_->Shards();
  ASSERT_TRUE(shards.ok()) << shards.status();
  EXPECT_EQ(shards->at(0).steps, 0);
  EXPECT_EQ(shards->at(1).steps, 4);
}

}  // namespace
}  // namespace Atoll::client
