#include "atoll/shard_optim/round_core.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "round_fixture.h"

namespace Atoll::shard_optim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(RoundCoreTest, AttachIsAnsweredOnceAllAreThere) {
  RoundCore core(Options(2, 1));
  std::vector<Action> actions;
  ASSERT_TRUE(core.Attach(0, Member(0), &actions).ok());
  EXPECT_TRUE(actions.empty());
  EXPECT_THAT(core.NotYetAttached(), ElementsAre(1));
  ASSERT_TRUE(core.Attach(1, Member(1), &actions).ok());
  EXPECT_EQ(actions.size(), 2u);
  EXPECT_TRUE(core.IsJoined(0) && core.IsJoined(1));
  EXPECT_EQ(core.Attach(1, Member(7), &actions).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(core.Attach(2, Member(1), &actions).code(), absl::StatusCode::kAlreadyExists);
}

TEST(RoundCoreTest, PastFutureAndForeignStepsAreRefusedWithTheReason) {
  RoundFixture f(Options(1, 2));
  EXPECT_EQ(f.Push(0, 0, 0).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(f.Push(0, 3, 0).status.message()),
              HasSubstr("step 3 is in the future: the current is 1"));
  for (int64_t step : {1, 2}) {
    for (int chunk : {0, 1}) EXPECT_EQ(f.Push(0, step, chunk).kind, Verdict::Kind::kTaken);
  }
  EXPECT_THAT(std::string(f.Push(0, 1, 0).status.message()), HasSubstr("step 1 of chunk 0 is past"));
  EXPECT_EQ(f.Push(0, 2, 0).kind, Verdict::Kind::kRepeated);
  f.Land(0, 2);
  EXPECT_EQ(f.replies.count({0, 2, 0}), 1u);
  EXPECT_EQ(f.core.steps(), 2);
}

TEST(RoundCoreTest, HyperParametersMustAgreeInARound) {
  RoundFixture f(Options(2, 1));
  f.Push(1, 1, 0, 7);
  Verdict verdict = f.Push(0, 1, 0, 8);
  EXPECT_TRUE(verdict.disagrees);
  EXPECT_EQ(verdict.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(f.Push(0, 1, 0, 7).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 1);
  EXPECT_EQ(f.Push(0, 2, 0, 8).kind, Verdict::Kind::kTaken);  // A new round, new values.
}

TEST(RoundCoreTest, ADeadWorkersPartStandsAndTheRestCompletes) {
  RoundFixture f(Options(3, 2));
  f.Push(0, 1, 0);
  f.Push(1, 1, 0);
  f.Push(1, 1, 1);
  f.Push(2, 1, 1);
  f.Kill(0);  // Had pushed chunk 0 only.
  EXPECT_THAT(f.applied[std::make_pair(1, int64_t{1})], ElementsAre(1, 2));
  EXPECT_EQ(f.applied.count({0, 1}), 0u);
  f.Push(2, 1, 0);
  EXPECT_THAT(f.applied[std::make_pair(0, int64_t{1})], ElementsAre(0, 1, 2));
  EXPECT_EQ(f.core.steps(), 1);
}

TEST(RoundCoreTest, ARestartedWorkerLearnsTheNextStepAndIsRefusedBefore) {
  RoundFixture f(Options(2, 1));
  f.Push(0, 1, 0);
  f.Push(1, 1, 0);
  f.Push(1, 2, 0);  // Round 2 has begun.
  f.Restart(0);     // Before anybody said that its old self died.
  EXPECT_EQ(f.core.WorkerOf(Member(0, 1)), -1);
  EXPECT_FALSE(f.core.IsJoined(0));
  EXPECT_EQ(f.core.steps(), 2);  // The survivor's round completed.
  EXPECT_EQ(f.core.NextStep(0), 3);
  EXPECT_THAT(std::string(f.Push(0, 3, 0).status.message()), HasSubstr("has not joined: join from step 3"));
  EXPECT_FALSE(f.Join(0, 2));
  EXPECT_TRUE(f.Join(0, 3));
  EXPECT_TRUE(f.Join(0, 3));  // A repeat.
  f.Push(1, 3, 0);
  EXPECT_EQ(f.core.steps(), 2);
  f.Push(0, 3, 0);
  EXPECT_EQ(f.core.steps(), 3);
}

TEST(RoundCoreTest, AJoinIntoABegunRoundIsRefusedAndALaterOneMovesIt) {
  RoundFixture f(Options(1, 1));
  f.lives.resize(2, 0);
  f.Restart(1);
  EXPECT_TRUE(f.Join(1, 1));
  f.Push(0, 1, 0);  // Round 1 begins with both.
  EXPECT_EQ(f.core.steps(), 0);
  EXPECT_TRUE(f.Join(1, 2));  // Another owner refused 1: this one must not wait for it in round 1.
  EXPECT_EQ(f.core.steps(), 1);
  f.Push(0, 2, 0);
  EXPECT_EQ(f.core.steps(), 1);
  EXPECT_EQ(f.Push(1, 2, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 2);
}

TEST(RoundCoreTest, RoundsThatNobodyAttendsAreSkipped) {
  RoundFixture f(Options(2, 2));
  for (int chunk : {0, 1}) {
    f.Push(0, 1, chunk);
    f.Push(1, 1, chunk);
  }
  f.Kill(0);
  f.Kill(1);
  f.Restart(0);
  f.Restart(1);
  EXPECT_TRUE(f.Join(0, 40));
  EXPECT_EQ(f.core.steps(), 39);  // At once: a pull of step 39 must not wait for step 40.
  EXPECT_TRUE(f.Join(1, 41));
  EXPECT_EQ(f.Push(0, 40, 1).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 39);
  EXPECT_EQ(f.applied.count({1, 40}), 1u);
  f.Kill(0);  // Chunk 0 of round 40 has nobody.
  EXPECT_EQ(f.core.steps(), 40);
  EXPECT_EQ(f.Push(1, 41, 0).kind, Verdict::Kind::kTaken);
}

TEST(RoundCoreTest, WhoParkedForTheNextRoundIsFreedWhenTheCurrentIsDeserted) {
  RoundFixture f(Options(1, 1));
  f.lives.resize(2, 0);
  f.Restart(1);
  EXPECT_TRUE(f.Join(1, 2));
  EXPECT_EQ(f.Push(1, 2, 0).kind, Verdict::Kind::kTaken);  // Worker 0 is still to do round 1.
  EXPECT_EQ(f.core.parked(), 1);
  f.Kill(0);
  EXPECT_EQ(f.core.steps(), 2);
  EXPECT_EQ(f.skipped, 1);
}

TEST(RoundCoreTest, ARoundBetweenOneThatLeftAndOneThatJoinsLaterIsSkipped) {
  RoundFixture f(Options(1, 1));
  f.lives.resize(2, 0);
  f.Restart(1);
  EXPECT_TRUE(f.Join(1, 3));
  f.Leave(0, 1);
  EXPECT_EQ(f.core.steps(), 0);
  f.Push(0, 1, 0);
  EXPECT_EQ(f.core.steps(), 2);
}

TEST(RoundCoreTest, LeavingShrinksTheRosterOfLaterRounds) {
  RoundFixture f(Options(2, 1));
  f.Push(0, 1, 0);
  f.Push(1, 1, 0);
  f.Push(0, 2, 0);
  f.Leave(1, 1);
  EXPECT_EQ(f.core.steps(), 2);
  EXPECT_THAT(std::string(f.Push(1, 3, 0).status.message()), HasSubstr("left after step 1"));
  f.Land(1, 1);  // Its last value still comes.
  EXPECT_EQ(f.replies.count({1, 1, 0}), 1u);
}

TEST(RoundCoreTest, TheRoundsLimitNamesWhoIsMissingAndOpensItAgain) {
  RoundFixture f(Options(2, 2));
  EXPECT_EQ(f.core.NextDeadline(), absl::InfiniteFuture());
  f.Push(0, 1, 0);
  f.Push(1, 1, 0);
  f.Push(0, 1, 1);
  f.Tick();
  EXPECT_TRUE(f.refusals.empty());
  f.now += absl::Seconds(60);
  EXPECT_EQ(f.core.NextDeadline(), f.now);
  f.Tick();
  ASSERT_EQ(f.refusals.size(), 1u);
  EXPECT_THAT(f.refusals[0],
              HasSubstr("round 1 did not complete within 1m: no gradient from worker 1 (worker1#"));
  EXPECT_EQ(f.core.NextDeadline(), absl::InfiniteFuture());
  // Nobody may join a half applied round; who was in it can finish it.
  EXPECT_EQ(f.core.NextStep(0), 2);
  EXPECT_EQ(f.Push(0, 1, 0).kind, Verdict::Kind::kRepeated);
  EXPECT_EQ(f.Push(1, 1, 1).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.Push(0, 1, 1).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 1);
}

TEST(RoundCoreTest, AStepThatIsMadeAgainIsAnsweredAfterItsOwnBackward) {
  for (const bool sync : {true, false}) {
    RoundFixture f(Options(sync ? 2 : 1, 2, sync));
    f.Push(0, 1, 0);
    if (sync) f.Push(1, 1, 0);
    f.Land(0, 1);
    EXPECT_EQ(f.replies.count({0, 1, 0}), 1u);
    f.Act([&](auto* actions) { EXPECT_TRUE(f.core.Attach(0, Member(0), actions).ok()); });
    f.landing[0] = 0;
    EXPECT_TRUE(f.core.IsJoined(0));
    EXPECT_EQ(f.Push(0, 1, 0).kind, Verdict::Kind::kRepeated);
    EXPECT_EQ(f.Push(0, 1, 1).kind, Verdict::Kind::kTaken);
    if (sync) f.Push(1, 1, 1);
    EXPECT_EQ(f.replies.size(), 1u);
    f.Land(0, 1);
    EXPECT_EQ(f.replies.count({0, 1, 0}), 2u);
    EXPECT_EQ(f.replies.count({0, 1, 1}), 1u);
  }
}

TEST(RoundCoreTest, AHalfAppliedRoundWhoseWorkersAllDiedDoesNotBlockTheNext) {
  RoundFixture f(Options(2, 2));
  f.Push(0, 1, 0);
  f.Push(1, 1, 0);
  f.Push(0, 1, 1);
  f.now += absl::Seconds(60);
  f.Tick();
  f.Kill(0);
  f.Kill(1);
  f.Restart(0);
  EXPECT_TRUE(f.Join(0, f.core.NextStep(0)));
  for (int chunk : {0, 1}) EXPECT_EQ(f.Push(0, 2, chunk).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 2);
}

TEST(RoundCoreTest, AsyncAppliesEveryContributionOnceInAnyOrder) {
  RoundFixture f(Options(2, 2, false));
  EXPECT_EQ(f.Push(1, 1, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.Push(1, 1, 0).kind, Verdict::Kind::kRepeated);
  EXPECT_EQ(f.Push(1, 2, 1).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.Push(1, 1, 1).kind, Verdict::Kind::kRepeated);  // Older than what was applied.
  EXPECT_THAT(std::string(f.Push(1, 4, 0).status.message()), HasSubstr("expected 2 or 3"));
  EXPECT_EQ(f.Push(0, 1, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.Push(0, 1, 1).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.async_applied, 4);
  EXPECT_EQ(f.core.steps(), 3) << "two of worker 1, one of worker 0, whatever their chunks";
  EXPECT_TRUE(f.replies.empty());
  f.Land(1, 2);
  EXPECT_EQ(f.replies.size(), 2u);
  f.Restart(1);
  EXPECT_EQ(f.core.NextStep(1), 3);
  EXPECT_FALSE(f.Join(1, 2));
  EXPECT_TRUE(f.Join(1, 5));
  EXPECT_EQ(f.Push(1, 5, 0).kind, Verdict::Kind::kTaken);
}

TEST(RoundCoreTest, WhoLeftAndAttachesAgainHasToJoin) {
  RoundFixture f(Options(1, 1));
  f.Leave(0, 0);
  std::vector<Action> actions;
  ASSERT_TRUE(f.core.Attach(0, Member(0), &actions).ok());
  EXPECT_FALSE(f.core.IsJoined(0));
  EXPECT_TRUE(f.Join(0, 1));
  EXPECT_TRUE(f.core.IsJoined(0));
  EXPECT_EQ(f.Push(0, 1, 0).kind, Verdict::Kind::kTaken);
}

}  // namespace
}  // namespace Atoll::shard_optim
