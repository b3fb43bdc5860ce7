// Rounds in every order of delivery, and under random scripts.
#include <random>

#include "gtest/gtest.h"
#include "round_fixture.h"

namespace Atoll::shard_optim {
namespace {

// ---- Every order of delivery ----------------------------------------------------------------------------

// Honest workers, each with its own position; any interleaving of their pushes, landings, repeats and one
// death.
struct World {
  RoundFixture fixture;
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
    const RoundFixture& f = world.fixture;
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
  RoundFixture f(options);
  EXPECT_EQ(f.Push(2, 1, 0).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(f.Push(1, 1, 0).status.code(), absl::StatusCode::kResourceExhausted);
  for (int w : {0, 1, 2}) EXPECT_EQ(f.Push(w, 1, 0).kind, Verdict::Kind::kTaken);
  EXPECT_EQ(f.core.steps(), 1);
}

// ---- Random scripts -------------------------------------------------------------------------------------

// Anything in any order; then the living play honestly on, and must be able to.
void RandomScript(uint32_t seed, bool sync) {
  std::mt19937 random(seed);
  auto pick = [&](int n) { return static_cast<int>(random() % n); };
  const int workers = 1 + pick(4), chunks = 1 + pick(3);
  RoundOptions options = Options(workers, chunks, sync);
  options.max_parked = pick(3) == 0 ? pick(4) : 1000;
  RoundFixture f(options);
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
