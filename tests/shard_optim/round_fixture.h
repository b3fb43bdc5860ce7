// A RoundCore with everyone attached, what it ordered, and the checks that hold whatever happens.
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "atoll/shard_optim/round_core.h"
#include "gtest/gtest.h"

namespace Atoll::shard_optim {

inline base::MemberId Member(int worker, uint64_t life = 1) {
  return {absl::StrCat("worker", worker), base::Incarnation(100 * life + worker)};
}

class RoundFixture {
 public:
  explicit RoundFixture(RoundOptions options) : core(options), options(options) {
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
      case Action::Kind::kAttached:
        ++attached;
        break;
      case Action::Kind::kFold:
        ASSERT_EQ(taken.count({a.worker, a.step, a.chunk}), 1u) << "folded what nobody pushed";
        ASSERT_TRUE(folded[key].empty() || folded[key].back() < a.worker) << "ranks out of order";
        ASSERT_EQ(applied.count(key), 0u) << "folded after it was applied";
        folded[key].push_back(a.worker);
        break;
      case Action::Kind::kApply:
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
      case Action::Kind::kSkip:
        ASSERT_GT(a.step, last[a.chunk]);
        ASSERT_TRUE(folded[key].empty());
        last[a.chunk] = a.step;
        ++skipped;
        break;
      case Action::Kind::kReply:
        ASSERT_LE(a.step, landing[a.worker]) << "a reply before the landing";
        if (options.sync) {
          ASSERT_EQ(applied.count(key), 1u) << "a reply before the value";
        }
        replies.insert({a.worker, a.step, a.chunk});
        contributors[key] = a.contributors;
        break;
      case Action::Kind::kDiscard:
        ASSERT_EQ(applied.count(key), 0u);
        folded.erase(key);
        break;
      case Action::Kind::kRefuse:
        refusals.push_back(std::string(a.status.message()));
        refused.insert({a.worker, a.step, a.chunk});
        break;
      case Action::Kind::kDrop:
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

inline RoundOptions Options(int workers, int chunks, bool sync = true) {
  return {.sync = sync, .worker_count = workers, .chunks = chunks};
}

}  // namespace Atoll::shard_optim
