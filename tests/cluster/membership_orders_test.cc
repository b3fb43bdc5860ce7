// All orders of delivery, and long random walks: whatever happens, invariants hold after each event, every
// call is answered exactly once, and every member is told every change, in order.
#include <functional>
#include <random>

#include "membership_script.h"

namespace Atoll::cluster {
namespace {

using Evidence = MembershipCore::Evidence;
using ProbeResult = MembershipCore::ProbeResult;
using Steps = std::vector<std::function<void(Script&)>>;

const Member kC = MakeMember("c", 1, 0);
const Member kA = MakeMember("a", 0xa1, 1);
const Member kB = MakeMember("b", 0xb1, 2);
const Member kA2 = MakeMember("a", 0xa2, 1);

/// Runs `steps` in every order; `first` goes before each.
void AllOrders(const Steps& first, const Steps& steps) {
  std::vector<size_t> order(steps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  do {
    Script script(3);
    for (const auto& step : first) step(script);
    for (size_t at : order) steps[at](script);
    script.Finish();
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "in the order " << ::testing::PrintToString(order);
      return;
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(MembershipOrders, ARestartWhileItsOldSelfIsJudged) {
  AllOrders({[](Script& s) { s.Join(kA); }, [](Script& s) { s.Poll(kA.id); }},
            {
                [](Script& s) { s.Join(kA2); },
                [](Script& s) { s.Heartbeat(kA.id).IgnoreError(); },
                [](Script& s) { s.Report(kC.id, kA.id, Evidence::kUnreachable); },
                [](Script& s) { s.Probed(kA.id, ProbeResult::kDead); },
                [](Script& s) { s.Leave(kA.id); },
                [](Script& s) { s.Poll(kC.id); },
                [](Script& s) { s.Join(kB); },
            });
}

TEST(MembershipOrders, ARestartWhoseOldSelfIsSilent) {
  AllOrders({[](Script& s) { s.Join(kA); }},
            {
                [](Script& s) { s.Join(kA2); },
                [](Script& s) { s.Join(MakeMember("a", 0xa3, 2), absl::Seconds(5)); },
                [](Script& s) { s.Heartbeat(kA.id).IgnoreError(); },
                [](Script& s) { s.Probed(kA.id, ProbeResult::kNoAnswer); },
                [](Script& s) { s.Report(kC.id, kA.id, Evidence::kUnreachable); },
                [](Script& s) { s.Advance(absl::Seconds(6)); },
                [](Script& s) { s.Join(kB); },
            });
}

TEST(MembershipOrders, GathersWhileMembersComeAndGo) {
  AllOrders({[](Script& s) { s.Join(kA); }, [](Script& s) { s.Poll(kC.id); }},
            {
                [](Script& s) { s.Gather(kC.id, "g", "c"); },
                [](Script& s) { s.Gather(kA.id, "g", "a"); },
                [](Script& s) { s.Join(kB); },
                [](Script& s) { s.Gather(kB.id, "g", "b"); },
                [](Script& s) { s.Report(kC.id, kA.id, Evidence::kSeen); },
                [](Script& s) { s.Gather(kA2.id, "g", "a2"); },
                [](Script& s) { s.Join(kA2); },
            });
}

TEST(MembershipOrders, DeadlinesBetween) {
  AllOrders({[](Script& s) { s.Join(kA); }, [](Script& s) { s.Join(kB); }},
            {
                [](Script& s) {
                  s.Gather(kC.id, "g", "c", {"a", "c"}, absl::Seconds(3));
                },
                [](Script& s) {
                  s.Gather(kA.id, "g", "a", {"a", "c"}, absl::Seconds(60));
                },
                [](Script& s) { s.Advance(absl::Seconds(4)); },
                [](Script& s) { s.Advance(absl::Seconds(9)); },
                [](Script& s) { s.Heartbeat(kB.id).IgnoreError(); },
                [](Script& s) { s.Poll(kB.id); },
                [](Script& s) { s.Leave(kA.id); },
            });
}

// Scenario users 14.
TEST(MembershipOrders, AGatherNeverMixesTwoUses) {
  // Three members, two uses each, in all orders that keep each member's own.
  std::vector<int> turns = {0, 0, 1, 1, 2, 2};
  const std::vector<base::MemberId> ids = {kC.id, kA.id, kB.id};
  do {
    Script script(3);
    script.Join(kA);
    script.Join(kB);
    std::vector<int> used(3);
    std::vector<std::vector<uint64_t>> calls(2);
    for (int who : turns) {
      int use = used[who]++;
      calls[use].push_back(script.Gather(ids[who], "g", std::to_string(use)));
    }
    for (int use = 0; use < 2; ++use) {
      for (uint64_t call : calls[use]) {
        EXPECT_EQ(script.Values(call), std::vector<std::string>(3, std::to_string(use)));
      }
    }
    script.Finish();
  } while (!::testing::Test::HasFailure() && std::next_permutation(turns.begin(), turns.end()));
}

TEST(MembershipOrders, RandomWalks) {
  for (uint32_t seed = 1; seed <= 600; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    const bool open = seed > 300;
    std::mt19937 random(seed);
    auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
    Script script(open ? kOpenWorld : 5);
    std::vector<Member> known = {kC};
    auto someone = [&]() -> const Member& {
      return known[known.size() - 1 - below(std::min<int>(known.size(), 8))];
    };
    for (int step = 0; step < 300 && !::testing::Test::HasFailure(); ++step) {
      switch (below(11)) {
        case 0:
          known.push_back(MakeMember(absl::StrCat("w", below(5)), 1000 + step,
                                     open && below(2) ? kAnyRank.value() : below(6)));
          script.Join(known.back());
          break;
        case 1:
          script.Join(someone());
          break;
        case 2:
          script.Heartbeat(someone().id).IgnoreError();
          break;
        case 3:
        case 4:
          script.Poll(someone().id);
          break;
        case 5:
          if (const Member& who = someone(); who.id != kC.id) script.Leave(who.id);
          break;
        case 6:
          script.Report(someone().id, someone().id, below(2) ? Evidence::kSeen : Evidence::kUnreachable);
          break;
        case 7:
          if (!script.probes().empty()) {
            script.Probed(*script.probes().begin(), static_cast<ProbeResult>(below(3)));
          }
          break;
        case 8:
          if (below(3) == 0) {
            script.Stall(absl::Seconds(below(15)));
          } else {
            script.Advance(absl::Milliseconds(below(4000)));
          }
          break;
        case 9:
          if (below(4) == 0) script.Withdraw(below(static_cast<int>(script.calls()) + 1));
          break;
        default:
          std::vector<std::string> participants;
          const Member& who = someone();
          if (below(2)) participants = {who.id.name, someone().id.name};
          script.Gather(who.id, below(2) ? "g" : "h", "v", participants, absl::Seconds(below(20)));
      }
    }
    script.Finish();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace Atoll::cluster
