#include "atoll/shard_optim/round_core.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace Atoll::shard_optim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = Action::Kind;

base::MemberId Member(int worker, uint64_t life = 1) {
  return {absl::StrCat("worker", worker), base::Incarnation(100 * life + worker)};
}

// A core with everyone attached, what it ordered, and the checks that hold whatever happens.
class Fixture {
 public:
  explicit Fixture(RoundOptions options) : core(options), options(options) {
    for (int w = 0; w < options.worker_count; ++w) {
      std::vector<Action> actions;
      EXPECT_TRUE(core.Attach(w, Member(w), &actions).ok());
      Run(actions);
      lives.push_back(1);
    }
  }

  Verdict Push(int worker, int64_t step, int chunk, uint64_t hyper = 1) {
    Verdict verdict = core.Contribute(worker, step, chunk, hyper, now);
    if (verdict.kind == Verdict::Kind::kTaken) taken.insert({worker, step, chunk});
    Run(verdict.actions);
    return verdict;
  }
  void Land(int worker, int64_t step) {
    landing[worker] = std::max(landing[worker], step);
    Act([&](auto* actions) { core.OpenLanding(worker, step, actions); });
  }
  void Kill(int worker) {
    Act([&](auto* actions) { core.Gone(Member(worker, lives[worker]), actions); });
    landing[worker] = 0;
  }
  void Restart(int worker) {
    ++lives[worker];
    Act([&](auto* actions) {
      EXPECT_TRUE(core.Attach(worker, Member(worker, lives[worker]), actions).ok());
    });
    landing[worker] = 0;
  }
  bool Join(int worker, int64_t step) {
    bool accepted = false;
    Act([&](auto* actions) { accepted = core.Join(worker, step, actions); });
    return accepted;
  }
  void Leave(int worker, int64_t after) {
    Act([&](auto* actions) { core.Leave(worker, after, actions); });
  }
  void Tick() {
    Act([&](auto* actions) { core.Tick(now, actions); });
  }

  template <class F>
  void Act(F f) {
    std::vector<Action> actions;
    f(&actions);
    Run(actions);
  }

  void Run(const std::vector<Action>& actions) {
    for (const Action& action : actions) Run(action);
    absl::Status status = core.CheckInvariants();
    ASSERT_TRUE(status.ok()) << status;
  }

  void Run(const Action& a) {
    auto key = std::make_pair(a.chunk, a.step);
    switch (a.kind) {
      case Kind::kAttached:
        ++attached;
        break;
      case Kind::kFold:
        ASSERT_EQ(taken.count({a.worker, a.step, a.chunk}), 1u) << "folded what nobody pushed";
        ASSERT_TRUE(folded[key].empty() || folded[key].back() < a.worker) << "ranks out of order";
        ASSERT_EQ(applied.count(key), 0u) << "folded after it was applied";
        folded[key].push_back(a.worker);
        break;
      case Kind::kApply:
        ASSERT_EQ(applied.count(key), 0u) << "applied twice";
        ASSERT_EQ(folded[key].size(), static_cast<size_t>(a.contributors));
        ASSERT_GT(a.contributors, 0);
        if (options.sync) {
          ASSERT_EQ(a.step, last[a.chunk] + 1);
        }
        last[a.chunk] = a.step;
        applied[key] = folded[key];
        if (!options.sync) folded[key].clear(), applied.erase(key), ++async_applied;
        break;
      case Kind::kSkip:
        ASSERT_GT(a.step, last[a.chunk]);
        ASSERT_TRUE(folded[key].empty());
        last[a.chunk] = a.step;
        ++skipped;
        break;
      case Kind::kReply:
        ASSERT_LE(a.step, landing[a.worker]) << "a reply before the landing";
        if (options.sync) {
          ASSERT_EQ(applied.count(key), 1u) << "a reply before the value";
        }
        replies.insert({a.worker, a.step, a.chunk});
        contributors[key] = a.contributors;
        break;
      case Kind::kDiscard:
        ASSERT_EQ(applied.count(key), 0u);
        folded.erase(key);
        break;
      case Kind::kRefuse:
        refusals.push_back(std::string(a.status.message()));
        refused.insert({a.worker, a.step, a.chunk});
        break;
      case Kind::kDrop:
        break;
    }
  }

  RoundCore core;
  RoundOptions options;
  absl::Time now = absl::UnixEpoch();
  int attached = 0, skipped = 0, async_applied = 0;
  std::vector<uint64_t> lives;
  std::map<int, int64_t> landing, last;
  std::set<std::tuple<int, int64_t, int>> taken, refused;
  std::multiset<std::tuple<int, int64_t, int>> replies;
  std::map<std::pair<int, int64_t>, std::vector<int>> folded, applied;
  std::map<std::pair<int, int64_t>, int> contributors;
  std::vector<std::string> refusals;
};

RoundOptions Options(int workers, int chunks, bool sync = true) {
  return {.sync = sync, .worker_count = workers, .chunks = chunks};
}

// ---- Every order of delivery ----------------------------------------------------------------------------

// Honest workers, each with its own position; any interleaving of their pushes, landings, repeats and one
// death.
struct World {
  Fixture fixture;
  int steps;
  bool may_kill, may_repeat;
  struct Worker {
    bool alive = true;
    int64_t step = 1;
    std::set<int> pushed;
    bool landed = false;
  };
  std::vector<Worker> workers;

  World(RoundOptions options, int steps, bool may_kill, bool may_repeat)
      : fixture(options),
        steps(steps),
        may_kill(may_kill),
        may_repeat(may_repeat),
        workers(options.worker_count) {}

  int chunks() const { return fixture.options.chunks; }
  bool Done() const {
    for (const Worker& worker : workers) {
      if (worker.alive && worker.step <= steps) return false;
    }
    return true;
  }
  // Moves a worker on once all its replies are there.
  void Settle() {
    for (size_t w = 0; w < workers.size(); ++w) {
      Worker& worker = workers[w];
      if (!worker.alive || worker.step > steps || !worker.landed) continue;
      bool all = true;
      for (int c = 0; c < chunks(); ++c)
        all &= fixture.replies.count({static_cast<int>(w), worker.step, c}) > 0;
      if (!all) continue;
      ++worker.step;
      worker.pushed.clear();
      worker.landed = false;
    }
  }
};

// Depth first through all orders; returns how many ends were reached.
int64_t Explore(const World& world) {
  if (::testing::Test::HasFatalFailure()) return 0;
  if (world.Done()) {
    const Fixture& f = world.fixture;
    bool dead = false;
    for (const auto& worker : world.workers) dead |= !worker.alive;
    for (int c = 0; c < world.chunks(); ++c) {
      for (int64_t s = 1; s <= world.steps; ++s) {
        auto found = f.applied.find({c, s});
        EXPECT_NE(found, f.applied.end()) << "chunk " << c << " step " << s << " was not applied";
        if (found == f.applied.end()) return 1;
        if (!dead) {
          EXPECT_EQ(found->second.size(), world.workers.size());
        }
      }
    }
    EXPECT_EQ(f.core.steps(), world.steps);
    EXPECT_EQ(f.core.parked(), 0);
    return 1;
  }
  int64_t ends = 0;
  bool moved = false;
  auto branch = [&](auto event) {
    World next = world;
    event(next);
    next.Settle();
    moved = true;
    ends += Explore(next);
  };
  for (size_t i = 0; i < world.workers.size(); ++i) {
    int w = static_cast<int>(i);
    const World::Worker& worker = world.workers[i];
    if (!worker.alive || worker.step > world.steps) continue;
    for (int c = 0; c < world.chunks(); ++c) {
      if (worker.pushed.count(c) > 0) continue;
      branch([&](World& next) {
        EXPECT_EQ(next.fixture.Push(w, worker.step, c).kind, Verdict::Kind::kTaken);
        next.workers[i].pushed.insert(c);
      });
    }
    if (world.may_repeat && !worker.pushed.empty()) {
      branch([&](World& next) {
        next.may_repeat = false;
        EXPECT_EQ(next.fixture.Push(w, worker.step, *worker.pushed.begin()).kind, Verdict::Kind::kRepeated);
      });
    }
    if (static_cast<int>(worker.pushed.size()) == world.chunks() && !worker.landed) {
      branch([&](World& next) {
        next.fixture.Land(w, worker.step);
        next.workers[i].landed = true;
      });
    }
    if (world.may_kill && w == 0) {
      branch([&](World& next) {
        next.may_kill = false;
        next.fixture.Kill(w);
        next.workers[i].alive = false;
      });
    }
  }
  EXPECT_TRUE(moved) << "nobody can move: a deadlock";
  return ends;
}

TEST(RoundCoreOrdersTest, TwoWorkersTwoChunksTwoSteps) {
  EXPECT_GT(Explore(World(Options(2, 2), 2, false, false)), 1000);
}
TEST(RoundCoreOrdersTest, TwoWorkersWithARepeatAndADeath) {
  EXPECT_GT(Explore(World(Options(2, 2), 1, true, true)), 1000);
}
TEST(RoundCoreOrdersTest, ThreeWorkersOneChunkTwoStepsWithADeath) {
  EXPECT_GT(Explore(World(Options(3, 1), 2, true, false)), 1000);
}
TEST(RoundCoreOrdersTest, NoParkingAllowedStillEnds) {
  // The lowest missing rank is always taken, so a worker that is refused only has to come again.
  RoundOptions options = Options(3, 1);
  options.max_parked = 0;
  Fixture f(options);
  EXPECT_EQ(f.Push(2, 1, 0).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(f.Push(1, 1, 0).status.code(), absl::StatusCode::kResourceExhausted);
  for (int w : {0, 1, 2}) EXPECT_EQ(f.Push(w, 1, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 1);
}

// ---- Single rules ---------------------------------------------------------------------------------------

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
  Fixture f(Options(1, 2));
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
  Fixture f(Options(2, 1));
  f.Push(1, 1, 0, 7);
  Verdict verdict = f.Push(0, 1, 0, 8);
  EXPECT_TRUE(verdict.disagrees);
  EXPECT_EQ(verdict.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(f.Push(0, 1, 0, 7).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 1);
  EXPECT_EQ(f.Push(0, 2, 0, 8).kind, Verdict::Kind::kTaken);  // A new round, new values.
}

TEST(RoundCoreTest, ADeadWorkersPartStandsAndTheRestCompletes) {
  Fixture f(Options(3, 2));
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
  Fixture f(Options(2, 1));
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
  Fixture f(Options(1, 1));
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
  Fixture f(Options(2, 2));
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
  Fixture f(Options(1, 1));
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
  Fixture f(Options(1, 1));
  f.lives.resize(2, 0);
  f.Restart(1);
  EXPECT_TRUE(f.Join(1, 3));
  f.Leave(0, 1);
  EXPECT_EQ(f.core.steps(), 0);
  f.Push(0, 1, 0);
  EXPECT_EQ(f.core.steps(), 2);
}

TEST(RoundCoreTest, LeavingShrinksTheRosterOfLaterRounds) {
  Fixture f(Options(2, 1));
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
  Fixture f(Options(2, 2));
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

TEST(RoundCoreTest, AHalfAppliedRoundWhoseWorkersAllDiedDoesNotBlockTheNext) {
  Fixture f(Options(2, 2));
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
  Fixture f(Options(2, 2, false));
  EXPECT_EQ(f.Push(1, 1, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.Push(1, 1, 0).kind, Verdict::Kind::kRepeated);
  EXPECT_EQ(f.Push(1, 2, 1).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.Push(1, 1, 1).kind, Verdict::Kind::kRepeated);  // Older than what was applied.
  EXPECT_THAT(std::string(f.Push(1, 4, 0).status.message()), HasSubstr("expected 2 or 3"));
  EXPECT_EQ(f.Push(0, 1, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.async_applied, 3);
  EXPECT_EQ(f.core.steps(), 3);
  EXPECT_TRUE(f.replies.empty());
  f.Land(1, 2);
  EXPECT_EQ(f.replies.size(), 2u);
  f.Restart(1);
  EXPECT_EQ(f.core.NextStep(1), 3);
  EXPECT_FALSE(f.Join(1, 2));
  EXPECT_TRUE(f.Join(1, 5));
  EXPECT_EQ(f.Push(1, 5, 0).kind, Verdict::Kind::kTaken);
}

// ---- Random scripts -------------------------------------------------------------------------------------

// Anything in any order; then the living play honestly on, and must be able to.
void RandomScript(uint32_t seed, bool sync) {
  std::mt19937 random(seed);
  auto pick = [&](int n) { return static_cast<int>(random() % n); };
  const int workers = 1 + pick(4), chunks = 1 + pick(3);
  RoundOptions options = Options(workers, chunks, sync);
  options.max_parked = pick(3) == 0 ? pick(4) : 1000;
  Fixture f(options);
  auto alive = [&](int w) { return f.core.WorkerOf(Member(w, f.lives[w])) == w; };
  for (int i = 0; i < 200 && !::testing::Test::HasFatalFailure(); ++i) {
    int w = pick(workers);
    int64_t next = f.core.NextStep(w);
    if (!alive(w)) {
      if (pick(3) == 0) f.Restart(w);
      continue;
    }
    switch (pick(14)) {
      case 0:
        if (pick(4) == 0) f.Kill(w);
        break;
      case 1:
        if (pick(4) == 0) f.Leave(w, next - pick(2));
        break;
      case 2:
        f.Join(w, next + pick(3) - 1);
        break;
      case 3:
        f.now += absl::Seconds(pick(40));
        f.Tick();
        break;
      case 4:
        f.Land(w, std::max<int64_t>(1, next - pick(2)));
        break;
      case 5:
        f.Push(w, next + pick(5) - 2, pick(chunks), 1 + pick(8) / 7);
        break;
      default:
        f.Push(w, std::max<int64_t>(1, next - pick(2)), pick(chunks));
    }
  }
  if (::testing::Test::HasFatalFailure()) return;
  int64_t from = 0;
  for (int w = 0; w < workers; ++w) {
    if (!alive(w)) f.Restart(w);
    from = std::max(from, f.core.NextStep(w) + 1);
  }
  for (int w = 0; w < workers; ++w) ASSERT_TRUE(f.Join(w, from));
  for (int64_t step = from; step < from + 2; ++step) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int w = 0; w < workers; ++w) ASSERT_EQ(f.Push(w, step, chunk).kind, Verdict::Kind::kTaken) << seed;
    }
    for (int w = 0; w < workers; ++w) f.Land(w, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int w = 0; w < workers; ++w) ASSERT_EQ(f.replies.count({w, step, chunk}), 1u) << seed;
      if (sync) {
        ASSERT_EQ(f.contributors[std::make_pair(chunk, step)], workers);
      }
    }
  }
}

TEST(RoundCoreRandomTest, SyncHoldsItsRulesAndRecovers) {
  for (uint32_t seed = 0; seed < 4000 && !HasFatalFailure(); ++seed) RandomScript(seed, true);
}
TEST(RoundCoreRandomTest, AsyncHoldsItsRulesAndRecovers) {
  for (uint32_t seed = 0; seed < 1000 && !HasFatalFailure(); ++seed) RandomScript(seed, false);
}

}  // namespace
}  // namespace Atoll::shard_optim
