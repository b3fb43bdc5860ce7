#include "atoll/client/step_core.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

namespace Atoll::client {
namespace {

using shard_optim::Layout;
using shard_optim::LayoutOptions;
using shard_optim::ParameterSpec;

// 'big' takes two chunks, 'a' and 'b' share one: three chunks in all.
Layout SmallLayout() {
  std::vector<ParameterSpec> parameters = {
      {"big", {2048}, {1}, c10::ScalarType::Float},
      {"a", {10}, {1}, c10::ScalarType::Float},
      {"b", {20}, {1}, c10::ScalarType::Float},
  };
  LayoutOptions options;
  options.owners = 1;
  options.chunk_bytes = 4096;
  options.small_parameter_bytes = 1024;
  auto layout = Layout::Create(parameters, options);
  EXPECT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->chunks().size(), 3u);
  return *std::move(layout);
}

class StepCoreTest : public testing::Test {
 protected:
  void SendAll() {
    core_.Begin();
    for (int i = 0; i < 3; ++i) core_.Sent(i);
  }
  Layout layout_ = SmallLayout();
  StepCore core_{&layout_};
};

TEST_F(StepCoreTest, IsOverWhenAllLandedInAnyOrder) {
  std::vector<int> order = {0, 1, 2};
  do {
    core_.Begin();
    EXPECT_FALSE(core_.idle());
    core_.Sent(order[0]);
    EXPECT_TRUE(core_.Landed(order[0], 3, 1));  // One may land before others are sent.
    EXPECT_FALSE(core_.Landed(order[0], 3, 1));
    core_.Sent(order[1]);
    core_.Sent(order[2]);
    EXPECT_EQ(core_.outstanding(), 2);
    EXPECT_TRUE(core_.Landed(order[2], 2, 1));
    EXPECT_FALSE(core_.over());
    EXPECT_EQ(core_.MissingOwners(), std::vector<int>{0});
    EXPECT_TRUE(core_.Landed(order[1], 3, 1));
    ASSERT_TRUE(core_.over());
    EXPECT_TRUE(core_.End().ok());
    EXPECT_EQ(core_.contributors(), 2);
    EXPECT_TRUE(core_.torn().empty());
    EXPECT_TRUE(core_.idle());
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(StepCoreTest, AFailureOfOneChunkOfTwoTearsTheParameter) {
  SendAll();
  core_.Landed(0, 1, 1);
  core_.Failed(1, absl::UnavailableError("owner0 died"));
  core_.Landed(2, 1, 1);
  absl::Status status = core_.End();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("1 of 3"), std::string::npos) << status;
  EXPECT_NE(status.message().find("owner0 died"), std::string::npos) << status;
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{0}));
  // Whole again only when all its chunks have come.
  SendAll();
  core_.Failed(0, absl::UnavailableError("x"));
  core_.Failed(1, absl::UnavailableError("x"));
  core_.Landed(2, 1, 1);
  EXPECT_FALSE(core_.End().ok());
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{0}));
  SendAll();
  for (int i = 0; i < 3; ++i) core_.Landed(i, 1, 1);
  EXPECT_TRUE(core_.End().ok());
  EXPECT_TRUE(core_.torn().empty());
}

TEST_F(StepCoreTest, ChunksOfTwoStepsTearTheParameterThoughAllHaveLanded) {
  SendAll();
  core_.Landed(0, 1, 7);
  core_.Landed(1, 1, 6);
  core_.Landed(2, 1, 7);
  EXPECT_TRUE(core_.End().ok());
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{0}));
  SendAll();  // The step is made again, and fails.
  for (int i = 0; i < 3; ++i) core_.Failed(i, absl::UnavailableError("x"));
  EXPECT_FALSE(core_.End().ok());
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{0}));
  SendAll();
  for (int i = 0; i < 3; ++i) core_.Landed(i, 1, 7);
  EXPECT_TRUE(core_.End().ok());
  EXPECT_TRUE(core_.torn().empty());
}

TEST_F(StepCoreTest, WhatIsLandingMayBeTornUntilItIsThere) {
  SendAll();
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{0, 1, 2}));
  core_.Landed(2, 1, 1);
  core_.Failed(0, absl::DeadlineExceededError("x"));
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{0})) << "chunk 1 of 'big' may still land";
  core_.Failed(1, absl::DeadlineExceededError("x"));
  EXPECT_TRUE(core_.torn().empty()) << "old, and whole";
  EXPECT_FALSE(core_.End().ok());
  EXPECT_TRUE(core_.torn().empty());
}

TEST_F(StepCoreTest, NothingLandedIsStaleAndWhole) {
  SendAll();
  for (int i = 0; i < 3; ++i) core_.Failed(i, absl::DeadlineExceededError("round"));
  EXPECT_EQ(core_.End().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(core_.torn().empty());
}

TEST_F(StepCoreTest, ABrokenLandingTearsAllThatShareTheChunk) {
  SendAll();
  core_.Landed(0, 1, 1);
  core_.Landed(1, 1, 1);
  core_.Failed(2, absl::DataLossError("cut in the middle"));
  EXPECT_EQ(core_.End().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(core_.torn(), (absl::btree_set<int>{1, 2}));
}

}  // namespace
}  // namespace Atoll::client
