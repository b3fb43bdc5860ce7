// A world without a size: members come and go, as many as there are.
#include "atoll/cluster/membership_core.h"

#include "membership_script.h"

namespace Atoll::cluster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ProbeResult = MembershipCore::ProbeResult;

const Member kC = MakeMember("c", 1, 0);
const Member kA = MakeMember("a", 0xa1, -1);
const Member kB = MakeMember("b", 0xb1, -1);
const Member kD = MakeMember("d", 0xd1, -1);

class OpenWorld : public ::testing::Test {
 protected:
  void TearDown() override { script_.Finish(); }
  void Expect(uint64_t call, absl::StatusCode code, const std::string& part) {
    absl::Status status = script_.Status(call);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
  std::string RankOf(const std::string& name) {
    for (const Member& member : script_.core().Members()) {
      if (member.id.name == name) return absl::StrCat(member.rank.value());
    }
    return "none";
  }
  Script script_{kOpenWorld};
};

// Scenario init 6.
TEST_F(OpenWorld, RanksAreGivenLowestFirstAndANameGetsItsOwnBack) {
  for (const Member& member : {kA, kB, kD}) EXPECT_TRUE(script_.Status(script_.Join(member)).ok());
  EXPECT_THAT(script_.Live(), ElementsAre("c", "a", "b", "d"));
  script_.Leave(kA.id);
  script_.Leave(kB.id);
  EXPECT_TRUE(script_.Status(script_.Join(MakeMember("b", 0xb2, -1))).ok());
  EXPECT_EQ(RankOf("b"), "2") << "as before";
  EXPECT_TRUE(script_.Status(script_.Join(MakeMember("e", 0xe1, -1))).ok());
  EXPECT_EQ(RankOf("e"), "1") << "the lowest that is free";
  EXPECT_TRUE(script_.Status(script_.Join(MakeMember("a", 0xa2, -1))).ok());
  EXPECT_EQ(RankOf("a"), "4") << "its old one is taken";
  EXPECT_TRUE(script_.Status(script_.Join(MakeMember("far", 0xf1, 1000))).ok()) << "or one of its own";
  uint64_t same = script_.Join(MakeMember("x", 0x11, 1000));
  script_.Probed(MakeMember("far", 0xf1, 1000).id, ProbeResult::kAlive);
  Expect(same, absl::StatusCode::kAlreadyExists, "its rank belongs to far#00f1");
}

TEST_F(OpenWorld, AJoinThatIsRepeatedGetsTheSameRank) {
  EXPECT_TRUE(script_.Status(script_.Join(kA)).ok());
  EXPECT_TRUE(script_.Status(script_.Join(kA)).ok());
  EXPECT_EQ(RankOf("a"), "1");
  EXPECT_EQ(script_.Live().size(), 2u);
}

TEST_F(OpenWorld, WhoComesAgainUnderItsNameWaitsForTheVerdictOnItsOldSelf) {
  script_.Join(kA);
  uint64_t again = script_.Join(MakeMember("a", 0xa2, -1));
  EXPECT_FALSE(script_.Answered(again));
  script_.Probed(kA.id, ProbeResult::kDead);
  EXPECT_TRUE(script_.Status(again).ok());
  EXPECT_EQ(RankOf("a"), "1");
  uint64_t third = script_.Join(MakeMember("a", 0xa3, -1));
  script_.Probed(MakeMember("a", 0xa2, 1).id, ProbeResult::kAlive);
  Expect(third, absl::StatusCode::kAlreadyExists,
         "a#00a3 (any rank) cannot join: its name belongs to a#00a2 (rank 1)");
}

TEST_F(OpenWorld, RanksThatCannotBeAreRefused) {
  Expect(script_.Join(MakeMember("x", 9, -2)), absl::StatusCode::kInvalidArgument,
         "or -1 for the lowest that is free");
  Expect(script_.Join(MakeMember("x", 9, MembershipCore::kMostRanks)), absl::StatusCode::kInvalidArgument,
         "should be from 0 to 1048575");
  Script fixed(2);
  EXPECT_EQ(fixed.Status(fixed.Join(kA)).code(), absl::StatusCode::kInvalidArgument)
      << "it has ranks of its own";
}

// Scenario users 137.
TEST_F(OpenWorld, AGatherIsOfThoseWhoAreThereWhenItBegins) {
  script_.Join(kA);
  script_.Join(kB);
  uint64_t c = script_.Gather(kC.id, "g", "C");
  script_.Join(kD);
  uint64_t d = script_.Gather(kD.id, "g", "D");  // Came too late for that one: this is the next.
  uint64_t a = script_.Gather(kA.id, "g", "A");
  EXPECT_FALSE(script_.Answered(a));
  uint64_t b = script_.Gather(kB.id, "g", "B");
  for (uint64_t call : {a, b, c}) EXPECT_THAT(script_.Values(call), ElementsAre("C", "A", "B"));
  EXPECT_FALSE(script_.Answered(d));
  for (const Member& member : {kC, kA, kB}) script_.Gather(member.id, "g", member.id.name + "2");
  EXPECT_THAT(script_.Values(d), ElementsAre("c2", "a2", "b2", "D"));
}

// Scenario users 137.
TEST_F(OpenWorld, WhoLeavesInTheMiddleOfAGatherEndsItWithItsName) {
  script_.Join(kA);
  script_.Join(kB);
  uint64_t c = script_.Gather(kC.id, "g", "C");
  uint64_t a = script_.Gather(kA.id, "g", "A");
  script_.Leave(kB.id);
  for (uint64_t call : {a, c}) Expect(call, absl::StatusCode::kUnavailable, "b#00b1 (rank 2) has left");
  // The next is of those that are left.
  c = script_.Gather(kC.id, "g", "C");
  a = script_.Gather(kA.id, "g", "A");
  for (uint64_t call : {a, c}) EXPECT_THAT(script_.Values(call), ElementsAre("C", "A"));
}

TEST_F(OpenWorld, ADeadlineNamesWhoIsMissing) {
  script_.Join(kA);
  uint64_t c = script_.Gather(kC.id, "g", "C");
  for (int i = 0; i < 2; ++i) {
    script_.Advance(absl::Seconds(3));
    EXPECT_TRUE(script_.Heartbeat(kA.id).ok());
  }
  Expect(c, absl::StatusCode::kDeadlineExceeded, "missing at its deadline: a#00a1 (rank 1)");
}

}  // namespace
}  // namespace Atoll::cluster
