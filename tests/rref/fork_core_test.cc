#include "atoll/rref/fork_core.h"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace Atoll::rref {
namespace {

using base::ForkId;
using base::Incarnation;
using base::MemberId;
using base::ObjectId;
using Kind = ForkCore::Begin::Kind;

const MemberId kAnn{"ann", Incarnation(11)};
const MemberId kBob{"bob", Incarnation(22)};
const Incarnation kSelf(1);

ForkId ForkOf(const MemberId& member, uint64_t counter) { return ForkId{member.incarnation, counter}; }

ObjectId Make(ForkCore& core, const ForkId& fork, const MemberId& holder, const std::string& name = "") {
  auto begin = core.BeginCreate(fork, holder, name);
  EXPECT_TRUE(begin.ok()) << begin.status();
  EXPECT_EQ(begin->kind, Kind::kMake);
  auto finished = core.FinishCreate(begin->id, true);
  EXPECT_EQ(finished.holders, std::vector<ForkId>{fork});
  core.CheckInvariants();
  return begin->id;
}

TEST(ForkCore, LastReleaseDropsTheObject) {
  ForkCore core(kSelf);
  const ObjectId id = Make(core, ForkOf(kAnn, 1), kAnn);
  EXPECT_TRUE(core.Alive(id));
  auto dropped = core.Release(ForkOf(kAnn, 1), kAnn);
  ASSERT_TRUE(dropped.ok());
  EXPECT_EQ(*dropped, std::vector<ObjectId>{id});
  EXPECT_FALSE(core.Alive(id));
  core.CheckInvariants();
}

TEST(ForkCore, ANameKeepsItUntilUnpinned) {
  ForkCore core(kSelf);
  const ObjectId id = Make(core, ForkOf(kAnn, 1), kAnn, "shard");
  EXPECT_TRUE(core.PeerGone(kAnn).empty());
  EXPECT_TRUE(core.Alive(id));
  auto found = core.Find(ForkOf(kBob, 1), kBob, "shard");
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->id, id);
  EXPECT_TRUE(core.Unpin("shard")->empty());  // Bob still holds it.
  EXPECT_EQ(core.Unpin("shard").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(*core.Release(ForkOf(kBob, 1), kBob), std::vector<ObjectId>{id});
  EXPECT_EQ(core.Find(ForkOf(kBob, 2), kBob, "shard").status().code(), absl::StatusCode::kNotFound);
  core.CheckInvariants();
}

TEST(ForkCore, RacingCreatorsWaitForTheFirst) {
  ForkCore core(kSelf);
  auto first = core.BeginCreate(ForkOf(kAnn, 1), kAnn, "shard");
  auto second = core.BeginCreate(ForkOf(kBob, 1), kBob, "shard");
  auto third = core.Find(ForkOf(kBob, 2), kBob, "shard");
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  EXPECT_EQ(first->kind, Kind::kMake);
  EXPECT_EQ(second->kind, Kind::kWait);
  EXPECT_EQ(third->kind, Kind::kWait);
  EXPECT_FALSE(core.Alive(first->id));
  auto finished = core.FinishCreate(first->id, true);
  EXPECT_EQ(finished.holders, (std::vector<ForkId>{ForkOf(kAnn, 1), ForkOf(kBob, 1), ForkOf(kBob, 2)}));
  EXPECT_FALSE(finished.drop);
  EXPECT_EQ(core.BeginCreate(ForkOf(kAnn, 2), kAnn, "shard")->kind, Kind::kHave);
  core.CheckInvariants();
}

TEST(ForkCore, AFailedCreationFailsAllWhoWaitAndFreesTheName) {
  ForkCore core(kSelf);
  auto first = core.BeginCreate(ForkOf(kAnn, 1), kAnn, "shard");
  ASSERT_TRUE(core.BeginCreate(ForkOf(kBob, 1), kBob, "shard").ok());
  auto finished = core.FinishCreate(first->id, false);
  EXPECT_TRUE(finished.holders.empty());
  EXPECT_EQ(finished.abandoned.size(), 2u);
  core.CheckInvariants();
  EXPECT_EQ(core.BeginCreate(ForkOf(kBob, 2), kBob, "shard")->kind, Kind::kMake);
}

TEST(ForkCore, AMemberThatDiesWhileItsObjectIsMadeLeavesNothing) {
  ForkCore core(kSelf);
  auto begin = core.BeginCreate(ForkOf(kAnn, 1), kAnn, "");
  ASSERT_TRUE(begin.ok());
  EXPECT_TRUE(core.PeerGone(kAnn).empty());
  auto finished = core.FinishCreate(begin->id, true);
  EXPECT_TRUE(finished.drop);
  EXPECT_FALSE(core.Alive(begin->id));
  EXPECT_EQ(core.BeginCreate(ForkOf(kAnn, 2), kAnn, "").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(core.Release(ForkOf(kAnn, 3), kAnn)->empty());
  core.CheckInvariants();
  EXPECT_TRUE(core.List().empty());
}

TEST(ForkCore, AnotherMembersForkCannotBeReleased) {
  ForkCore core(kSelf);
  const ObjectId id = Make(core, ForkOf(kAnn, 1), kAnn);
  EXPECT_EQ(core.Release(ForkOf(kAnn, 1), kBob).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(core.Alive(id));
}

TEST(ForkCore, LimitsAreKept) {
  ForkCore core(kSelf, {.objects = 2, .forks_per_member = 3, .departed_members = 1});
  Make(core, ForkOf(kAnn, 1), kAnn);
  Make(core, ForkOf(kAnn, 2), kAnn, "x");
  EXPECT_EQ(core.BeginCreate(ForkOf(kBob, 1), kBob, "").status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(core.Find(ForkOf(kAnn, 3), kAnn, "x").ok());
  EXPECT_EQ(core.Find(ForkOf(kAnn, 4), kAnn, "x").status().code(), absl::StatusCode::kResourceExhausted);
  core.CheckInvariants();
}

// Two members create, find and release one named object, the factory ends and one member dies: whatever the
// order and however often a release is repeated, the tables agree after each event, and at the end exactly
// the references that were not given up hold.
TEST(ForkCore, EveryOrderOfEventsAgrees) {
  enum Event { kCreateAnn, kCreateBob, kReleaseAnn, kReleaseAnnAgain, kFindBob, kFinish, kAnnGone };
  std::vector<int> order = {kCreateAnn, kCreateBob, kReleaseAnn, kReleaseAnnAgain,
                            kFindBob,   kFinish,    kAnnGone};
  int orders = 0;
  do {
    for (bool made : {true, false}) {
      ForkCore core(kSelf);
      std::vector<ObjectId> making;
      ObjectId object;
      bool bob_created = false, bob_found = false;
      auto finish = [&] {
        for (const ObjectId& id : making) {
          auto finished = core.FinishCreate(id, made);
          for (const ForkId& fork : finished.abandoned) {
            if (fork == ForkOf(kBob, 1)) bob_created = false;
            if (fork == ForkOf(kBob, 2)) bob_found = false;
          }
          if (made && !finished.drop) object = id;
        }
        making.clear();
      };
      for (int event : order) {
        switch (event) {
          case kCreateAnn:
          case kCreateBob: {
            const MemberId& who = event == kCreateAnn ? kAnn : kBob;
            auto begin = core.BeginCreate(ForkOf(who, 1), who, "name");
            if (event == kCreateBob) {
              ASSERT_TRUE(begin.ok()) << begin.status();
              bob_created = true;
            }
            if (begin.ok() && begin->kind == Kind::kMake) making.push_back(begin->id);
            break;
          }
          case kReleaseAnn:
          case kReleaseAnnAgain:
            ASSERT_TRUE(core.Release(ForkOf(kAnn, 1), kAnn).ok());
            break;
          case kFindBob:
            bob_found = core.Find(ForkOf(kBob, 2), kBob, "name").ok();
            break;
          case kFinish:
            finish();
            break;
          case kAnnGone:
            core.PeerGone(kAnn);
            break;
        }
        core.CheckInvariants();
      }
      finish();
      core.CheckInvariants();
      std::vector<MemberId> expected(size_t{bob_created} + size_t{bob_found}, kBob);
      auto entries = core.List();
      if (entries.empty()) {
        EXPECT_TRUE(expected.empty());
      } else {
        ASSERT_EQ(entries.size(), 1u);  // The name keeps it.
        EXPECT_EQ(entries[0].id, object);
        EXPECT_EQ(entries[0].holders, expected);
      }
      ++orders;
    }
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 2 * 5040);
}

}  // namespace
}  // namespace Atoll::rref
