#include "atoll/server/lifetime_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace Atoll::server {
namespace {

using ::testing::HasSubstr;
using Verdict = LifetimeCore::Verdict;

const absl::Time kStart = absl::UnixEpoch();
constexpr absl::Duration kPatience = absl::Seconds(5);

LifetimeCore TwoWorkersTwoOwners() {
  LifetimeCore core(kPatience, 3);
  core.OnJoined("owner1", false);
  core.OnJoined("worker0", true);
  core.OnJoined("worker1", true);
  return core;
}

TEST(LifetimeCoreTest, DoneWhenAllWorkersLeftHoweverLate) {
  LifetimeCore core = TwoWorkersTwoOwners();
  EXPECT_EQ(core.At(kStart + absl::Hours(1000)), Verdict::kServe);
  EXPECT_EQ(core.NextCheck(), absl::InfiniteFuture());
  core.OnLeft("worker0");
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.workers_here(), 1);
  core.OnLeft("worker1");
  EXPECT_EQ(core.At(kStart), Verdict::kDone);
}

TEST(LifetimeCoreTest, OwnersThatLeaveDoNotEndIt) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnLeft("owner1");
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.workers_here(), 2);
}

TEST(LifetimeCoreTest, ServesUntilAllWereThereAndForgetsWhatWasBefore) {
  LifetimeCore core(kPatience, 3);
  EXPECT_TRUE(core.OnJoined("owner1", false));
  EXPECT_TRUE(core.OnJoined("worker0", true));
  EXPECT_FALSE(core.OnJoined("worker0", true));
  core.OnLeft("worker0");  // It gave up waiting, and was started again.
  core.OnDead("owner1", "killed", kStart);
  EXPECT_EQ(core.At(kStart + absl::Hours(1000)), Verdict::kServe);
  core.OnJoined("owner1", false);
  core.OnJoined("worker1", true);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  core.OnJoined("worker0", true);
  core.OnDead("worker0", "killed", kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.NextCheck(), absl::InfiniteFuture());
  core.OnDead("worker1", "killed", kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kFailed) << "nobody has left in order since it began";
}

TEST(LifetimeCoreTest, AStopEndsTheWaitForTheOthers) {
  LifetimeCore core(kPatience, 3);
  core.OnStop(kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.At(kStart + kPatience), Verdict::kStopped);
}

TEST(LifetimeCoreTest, DoneWithTheSurvivors) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnDead("worker1", "killed", kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  core.OnLeft("worker0");
  EXPECT_EQ(core.At(kStart), Verdict::kDone);
}

TEST(LifetimeCoreTest, FailedWhenAllWorkersDied) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnDead("worker1", "killed", kStart);
  core.OnDead("worker0", "silent for 10s", kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kFailed);
  EXPECT_THAT(core.WhatFailed(), HasSubstr("worker1 died: killed; worker0 died: silent for 10s"));
}

TEST(LifetimeCoreTest, AnOwnersDeathGivesTheWorkersSomeTime) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnDead("owner1", "killed", kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.NextCheck(), kStart + kPatience);
  EXPECT_EQ(core.At(kStart + kPatience), Verdict::kFailed);
  core.OnLeft("worker0");
  core.OnLeft("worker1");
  EXPECT_EQ(core.At(kStart), Verdict::kFailed);
}

TEST(LifetimeCoreTest, ACoordinatorThatLeavesGivesTheWorkersSomeTimeToo) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnLeft("owner1");
  EXPECT_EQ(core.At(kStart + absl::Hours(1)), Verdict::kServe);
  core.OnUnled("it has left the job", kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.NextCheck(), kStart + kPatience);
  EXPECT_EQ(core.At(kStart + kPatience), Verdict::kFailed);
  EXPECT_THAT(core.WhatFailed(), HasSubstr("no coordinator any more: it has left the job"));
}

TEST(LifetimeCoreTest, FailedWhenWeAreNoMemberAnyMore) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnExpelled("silent for 10s");
  EXPECT_EQ(core.At(kStart), Verdict::kFailed);
  EXPECT_THAT(core.WhatFailed(), HasSubstr("no member any more: silent for 10s"));
}

TEST(LifetimeCoreTest, StopWaitsForWorkersButNotForEver) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnStop(kStart);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
  EXPECT_EQ(core.At(kStart + kPatience), Verdict::kStopped);
  core.OnStop(kStart + absl::Seconds(3));  // A second one does not prolong it.
  EXPECT_EQ(core.NextCheck(), kStart + kPatience);
  core.OnLeft("worker0");
  core.OnLeft("worker1");
  EXPECT_EQ(core.At(kStart), Verdict::kStopped);
}

TEST(LifetimeCoreTest, EventsAboutOthersOrTwiceChangeNothing) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnJoined("worker0", true);
  core.OnLeft("nobody");
  core.OnDead("nobody", "", kStart);
  EXPECT_EQ(core.workers_here(), 2);
  core.OnLeft("worker0");
  core.OnLeft("worker0");
  core.OnDead("worker0", "late", kStart);
  EXPECT_EQ(core.workers_here(), 1);
  EXPECT_EQ(core.At(kStart), Verdict::kServe);
}

TEST(LifetimeCoreTest, ARestartedWorkerCounts) {
  LifetimeCore core = TwoWorkersTwoOwners();
  core.OnLeft("worker0");
  core.OnDead("worker1", "killed", kStart);
  core.OnJoined("worker1", true);
  EXPECT_EQ(core.workers_here(), 1);
  core.OnLeft("worker1");
  EXPECT_EQ(core.At(kStart), Verdict::kDone);
}

}  // namespace
}  // namespace Atoll::server
