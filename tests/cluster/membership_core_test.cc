#include "atoll/cluster/membership_core.h"

#include "membership_script.h"

namespace Atoll::cluster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Evidence = MembershipCore::Evidence;
using ProbeResult = MembershipCore::ProbeResult;
using Kind = MemberEvent::Kind;

const Member kCoordinator = MakeMember("c", 1, 0);
const Member kA = MakeMember("a", 0xa1, 1);
const Member kB = MakeMember("b", 0xb1, 2);
const Member kA2 = MakeMember("a", 0xa2, 1);

void ExpectStatus(const absl::Status& status, absl::StatusCode code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(part));
}

TEST(MembershipCore, MembersJoinAndAllAreToldInOrder) {
  Script script(3);
  uint64_t watch = script.Poll(kCoordinator.id);
  EXPECT_FALSE(script.Answered(watch));
  uint64_t join = script.Join(kA);
  EXPECT_TRUE(script.Status(join).ok());
  ASSERT_EQ(script.Events(watch).size(), 1u);
  EXPECT_EQ(script.Events(watch)[0].member.id, kA.id);
  EXPECT_EQ(script.Events(watch)[0].member.addresses, kA.addresses);
  script.Join(kB);
  uint64_t later = script.Poll(kA.id);
  ASSERT_EQ(script.Events(later).size(), 1u) << "what came between two polls";
  EXPECT_EQ(script.Events(later)[0].member.id, kB.id);
  EXPECT_THAT(script.Live(), ElementsAre("c", "a", "b"));
  script.Finish();
}

TEST(MembershipCore, ALiveNameOrRankIsRefusedNamingBoth) {
  Script script(3);
  script.Join(kA);
  uint64_t join = script.Join(kA2);
  EXPECT_FALSE(script.Answered(join)) << "the holder is probed first";
  EXPECT_EQ(script.probes().count(kA.id), 1u);
  uint64_t rank = script.Join(MakeMember("x", 9, 1));
  script.Probed(kA.id, ProbeResult::kAlive);
  ExpectStatus(script.Status(join), absl::StatusCode::kAlreadyExists,
               "a#00a2 (rank 1) cannot join: its name belongs to a#00a1 (rank 1), which is alive");
  ExpectStatus(script.Status(rank), absl::StatusCode::kAlreadyExists,
               "x#0009 (rank 1) cannot join: its rank belongs to a#00a1 (rank 1)");
  ExpectStatus(script.Status(script.Join(MakeMember("c", 7, 2))), absl::StatusCode::kAlreadyExists, "c#0001");
  ExpectStatus(script.Status(script.Join(MakeMember("y", 7, 0))), absl::StatusCode::kAlreadyExists, "c#0001");
  EXPECT_THAT(script.Live(), ElementsAre("c", "a"));
  script.Finish();
}

TEST(MembershipCore, WhoseOldSelfIsSilentJoinsWhenItsLeaseEnds) {
  Script script(3);
  script.Join(kA);
  script.Advance(absl::Seconds(4));
  uint64_t join = script.Join(kA2);
  script.Probed(kA.id, ProbeResult::kNoAnswer);
  EXPECT_FALSE(script.Answered(join)) << "its host may have died";
  script.Advance(absl::Seconds(5));
  EXPECT_FALSE(script.Answered(join));
  EXPECT_EQ(script.probes().count(kA.id), 1u) << "it is asked again";
  script.Advance(absl::Seconds(2));
  EXPECT_TRUE(script.Status(join).ok()) << script.Status(join);
  EXPECT_TRUE(script.Heartbeat(kA2.id).ok());
  script.Finish();
}

TEST(MembershipCore, ASilentHolderThatIsHeardAgainKeepsItsName) {
  Script script(3);
  script.Join(kA);
  uint64_t join = script.Join(kA2);
  script.Probed(kA.id, ProbeResult::kNoAnswer);
  script.Advance(absl::Seconds(1));
  EXPECT_TRUE(script.Heartbeat(kA.id).ok());
  script.Advance(absl::Milliseconds(2500));
  ExpectStatus(script.Status(join), absl::StatusCode::kAlreadyExists, "which is alive");
  // One that answers the next probe.
  join = script.Join(kA2);
  script.Probed(kA.id, ProbeResult::kNoAnswer);
  script.Advance(absl::Milliseconds(2500));
  EXPECT_FALSE(script.Answered(join));
  script.Probed(kA.id, ProbeResult::kAlive);
  ExpectStatus(script.Status(join), absl::StatusCode::kAlreadyExists, "which is alive");
  EXPECT_THAT(script.Live(), ElementsAre("c", "a"));
  script.Finish();
}

TEST(MembershipCore, AJoinThatNobodyWaitsForLeavesNothing) {
  Script script(3);
  script.Join(kA);
  uint64_t short_one = script.Join(kA2, absl::Seconds(5));
  uint64_t withdrawn = script.Join(MakeMember("a", 0xa3, 1));
  uint64_t patient = script.Join(MakeMember("a", 0xa4, 1));
  script.Probed(kA.id, ProbeResult::kNoAnswer);
  script.Advance(absl::Seconds(5));
  ExpectStatus(script.Status(short_one), absl::StatusCode::kAlreadyExists,
               "its name belongs to a#00a1 (rank 1), which does not answer but whose lease still runs");
  script.Withdraw(withdrawn);
  script.Withdraw(withdrawn);
  ExpectStatus(script.Status(withdrawn), absl::StatusCode::kCancelled, "");
  script.Advance(absl::Seconds(5));
  EXPECT_TRUE(script.Status(patient).ok()) << script.Status(patient);
  ExpectStatus(script.Heartbeat(kA2.id), absl::StatusCode::kNotFound, "");
  script.Finish();
}

TEST(MembershipCore, ASeenDeathLetsInWhoWaitsAndAReportAsksAgain) {
  Script script(3);
  script.Join(kA);
  script.Join(kB);
  uint64_t join = script.Join(kA2);
  script.Probed(kA.id, ProbeResult::kNoAnswer);
  EXPECT_TRUE(script.probes().empty());
  script.Report(kB.id, kA.id, Evidence::kUnreachable);
  EXPECT_EQ(script.probes().count(kA.id), 1u);
  EXPECT_FALSE(script.Answered(join));
  script.Probed(kA.id, ProbeResult::kDead);
  EXPECT_TRUE(script.Status(join).ok()) << script.Status(join);
  script.Finish();
}

TEST(MembershipCore, AProcessThatWasKilledIsReplacedAtOnce) {
  Script script(3);
  script.Join(kA);
  uint64_t join = script.Join(kA2);
  uint64_t watch = script.Poll(kCoordinator.id);
  uint64_t next = script.Poll(kCoordinator.id);
  EXPECT_TRUE(script.Answered(watch));
  script.Probed(kA.id, ProbeResult::kDead);
  EXPECT_TRUE(script.Status(join).ok()) << script.Status(join);
  ASSERT_TRUE(script.Answered(next));
  EXPECT_EQ(script.Events(next)[0].kind, Kind::kDead);
  uint64_t last = script.Poll(kCoordinator.id);
  EXPECT_EQ(script.Events(last).back().member.id, kA2.id);
  ExpectStatus(script.Heartbeat(kA.id), absl::StatusCode::kFailedPrecondition,
               "was declared dead: seen by c: refused");
  script.Finish();
}

TEST(MembershipCore, AJoinWaitsForEachInItsWay) {
  Script script(3);
  script.Join(kA);
  script.Join(kB);
  uint64_t join = script.Join(MakeMember("a", 5, 2));  // a's name and b's rank.
  script.Probed(kA.id, ProbeResult::kDead);
  EXPECT_FALSE(script.Answered(join));
  script.Leave(kB.id);
  EXPECT_TRUE(script.Status(join).ok());
  script.Finish();
}

TEST(MembershipCore, WhatCannotBeIsRefused) {
  Script script(2);
  auto refused = [&](Member member, const std::string& part) {
    ExpectStatus(script.Status(script.Join(member)), absl::StatusCode::kInvalidArgument, part);
  };
  refused(MakeMember("b", 1, 2), "its rank should be from 0 to 1, the job has a world of 2");
  refused(MakeMember("b", 1, -1), "its rank should be from 0 to 1");
  refused(MakeMember("", 1, 1), "a member's name");
  refused(MakeMember("a b", 1, 1), "a member's name");
  refused(MakeMember(std::string(128, 'n'), 1, 1), "a member's name");
  refused(MakeMember("a", 0, 1), "no incarnation");
  refused(MakeMember("a\n\x1b[31m", 1, 1), "letters, digits and '_', '.', ':', '-': 'a\\n\\x1b[31m' is not");
  Member member = kA;
  member.role = "";
  refused(member, "no role");
  member.role = "x\n";
  refused(member, "no role of 1 to 32 letters, digits and '_', '.', ':', '-'");
  member = kA;
  member.addresses.clear();
  refused(member, "addresses");
  member.addresses = std::vector<std::string>(MembershipCore::kMaxAddresses + 1, "x:1");
  refused(member, "addresses");
  member.addresses = {std::string(513, 'x')};
  refused(member, "addresses");
  script.Join(kA);
  Member moved = kA;
  moved.rank = base::Rank(0);
  refused(moved, "cannot join as rank 0");
  script.Finish();
}

TEST(MembershipCore, AMemberMayHaveAsManyAddressesAsAnEndpointLists) {
  Script script(2);
  Member member = kA;
  member.addresses = std::vector<std::string>(MembershipCore::kMaxAddresses, std::string(512, 'x'));
  EXPECT_TRUE(script.Status(script.Join(member)).ok());
  script.Finish();
}

TEST(MembershipCore, ARepeatedJoinIsAnsweredAgain) {
  Script script(3);
  EXPECT_TRUE(script.Status(script.Join(kA)).ok());
  uint64_t events = script.core().last_event();
  EXPECT_TRUE(script.Status(script.Join(kA)).ok());
  EXPECT_EQ(script.core().last_event(), events);
  script.Finish();
}

TEST(MembershipCore, HeartbeatsKeepALeaseAndSilenceEndsIt) {
  Script script(3);
  script.Join(kA);
  script.Join(kB);
  for (int i = 0; i < 10; ++i) {
    script.Advance(absl::Seconds(3));
    if (i < 3) {
      EXPECT_TRUE(script.Heartbeat(kB.id).ok());
    }
    EXPECT_TRUE(script.Heartbeat(kA.id).ok());
  }
  EXPECT_THAT(script.Live(), ElementsAre("c", "a"));
  ExpectStatus(
      script.Heartbeat(kB.id), absl::StatusCode::kFailedPrecondition,
      "b#00b1 (rank 2) is no longer in the job: it was declared dead: nothing was heard of it for 10s");
  ExpectStatus(script.Heartbeat({"z", base::Incarnation(4)}), absl::StatusCode::kNotFound, "z#0004");
  ExpectStatus(script.Status(script.Join(kB)), absl::StatusCode::kFailedPrecondition,
               "a new incarnation only");
  uint64_t poll = script.Poll(kB.id);
  ExpectStatus(script.Status(poll), absl::StatusCode::kFailedPrecondition, "declared dead");
  script.Finish();
}

TEST(MembershipCore, PollsAndGathersRenewALeaseToo) {
  Script script(3);
  script.Join(kA);
  for (int i = 0; i < 5; ++i) {
    script.Advance(absl::Seconds(6));
    script.Poll(kA.id);
    script.Advance(absl::Seconds(6));
    script.Gather(kA.id, "alone", "", {"a"});
  }
  EXPECT_THAT(script.Live(), ElementsAre("c", "a"));
  script.Finish();
}

TEST(MembershipCore, WhatElseWasHeardOfAMemberKeepsItsLease) {
  Script script(3);
  script.Join(kA);
  script.Join(kB);
  script.Advance(absl::Seconds(9));
  EXPECT_THAT(script.core().Late(script.clock().Now()), ElementsAre());
  EXPECT_THAT(script.core().Late(script.clock().Now() + absl::Seconds(1)), ElementsAre(kA.id, kB.id));
  script.Heard(kA.id, absl::Seconds(2));
  script.Heard(kA.id, absl::Seconds(5));  // Older: tells nothing.
  script.Heard(kA2.id, absl::ZeroDuration());
  script.Heard(kCoordinator.id, absl::ZeroDuration());
  EXPECT_THAT(script.core().Late(script.clock().Now() + absl::Seconds(1)), ElementsAre(kB.id));
  script.Advance(absl::Milliseconds(7900));
  EXPECT_THAT(script.Live(), ElementsAre("c", "a"));
  script.Advance(absl::Milliseconds(100));
  EXPECT_THAT(script.Live(), ElementsAre("c"));
  script.Finish();
}

TEST(MembershipCore, AStoppedCoordinatorDoesNotBuryItsMembers) {
  Script script(3);
  script.Join(kA);
  script.Advance(absl::Seconds(8));
  script.Stall(absl::Seconds(100));
  EXPECT_THAT(script.Live(), ElementsAre("c", "a")) << "heartbeats wait in the queues";
  EXPECT_TRUE(script.Heartbeat(kA.id).ok());
  script.Advance(absl::Seconds(11));
  EXPECT_THAT(script.Live(), ElementsAre("c"));
  script.Finish();
}

TEST(MembershipCore, ReportsCountByWhatWasSeen) {
  Script script(3);
  script.Join(kA);
  script.Join(kB);
  script.Report(kB.id, kA.id, Evidence::kUnreachable);
  EXPECT_THAT(script.Live(), ElementsAre("c", "a", "b"));
  script.Probed(kA.id, ProbeResult::kAlive);
  EXPECT_THAT(script.Live(), ElementsAre("c", "a", "b")) << "only b does not reach it";
  script.Report(kB.id, kA.id, Evidence::kUnreachable);
  script.Probed(kA.id, ProbeResult::kNoAnswer);
  EXPECT_THAT(script.Live(), ElementsAre("c", "a", "b")) << "its lease decides";
  script.Report(kB.id, kCoordinator.id, Evidence::kSeen);
  script.Report(kB.id, kB.id, Evidence::kSeen);
  script.Report({"z", base::Incarnation(3)}, kA.id, Evidence::kSeen);
  script.Report(kB.id, kA2.id, Evidence::kSeen);
  EXPECT_THAT(script.Live(), ElementsAre("c", "a", "b")) << "of the coordinator, itself, a stranger, another";
  script.Report(kB.id, kA.id, Evidence::kSeen);
  EXPECT_THAT(script.Live(), ElementsAre("c", "b"));
  script.Report(kCoordinator.id, kB.id, Evidence::kUnreachable);
  EXPECT_THAT(script.Live(), ElementsAre("c"));
  script.Finish();
}

TEST(MembershipCore, ANewcomerHearsWhoseMembersLeftInOrder) {
  Script script(4);
  script.Join(kA);
  script.Join(kB);
  auto left = [&script](const Member& member) {
    std::vector<int> ranks;
    MembershipCore& core = script.core();
    const absl::Time now = script.clock().Now();
    for (auto& action : core.Join(member, 1000, now + absl::Seconds(1), now)) {
      if (auto* answer = std::get_if<MembershipCore::JoinAnswer>(&action); answer != nullptr) {
        for (const base::Rank rank : answer->left) ranks.push_back(rank.value());
      }
    }
    core.Leave(member.id, now, "it was only to look");
    return ranks;
  };
  script.Leave(kA.id);
  script.Leave(kB.id, "out of memory");
  EXPECT_THAT(left(MakeMember("x", 0x11, 3)), ElementsAre(1)) << "not who failed";
  script.Join(kA2);
  EXPECT_THAT(left(MakeMember("y", 0x12, 3)), ElementsAre()) << "who is there again";
}

TEST(MembershipCore, LeavingIsAnEventAndNotADeath) {
  Script script(3);
  script.Join(kA);
  uint64_t own = script.Poll(kA.id);
  uint64_t watch = script.Poll(kCoordinator.id);
  watch = script.Poll(kCoordinator.id);
  script.Leave(kA.id);
  script.Leave(kA.id);
  ASSERT_EQ(script.Events(watch).size(), 1u);
  EXPECT_EQ(script.Events(watch)[0].kind, Kind::kLeft);
  EXPECT_TRUE(script.Events(watch)[0].reason.ok());
  ExpectStatus(script.Status(own), absl::StatusCode::kFailedPrecondition, "has left");
  EXPECT_TRUE(script.Status(script.Join(kA2)).ok());
  script.Finish();
}

TEST(MembershipCore, WhoLeavesBecauseItFailedSaysWhy) {
  Script script(3);
  script.Join(kA);
  uint64_t own = script.Poll(kA.id);
  uint64_t watch = script.Poll(kCoordinator.id);
  watch = script.Poll(kCoordinator.id);
  script.Leave(kA.id, "no data");
  ASSERT_EQ(script.Events(watch).size(), 1u);
  EXPECT_EQ(script.Events(watch)[0].kind, Kind::kLeft);
  ExpectStatus(script.Events(watch)[0].reason, absl::StatusCode::kUnavailable, "failed: no data");
  ExpectStatus(script.Status(own), absl::StatusCode::kFailedPrecondition, "failed: no data");
  script.Finish();
}

TEST(MembershipCore, WhatAMemberSaysIsOneLine) {
  Script script(3);
  script.Join(kA);
  script.Leave(kA.id, "no\ndata\x1b[2J");
  ExpectStatus(script.Heartbeat(kA.id), absl::StatusCode::kFailedPrecondition, "failed: no data\\x1b[2J");
  script.Finish();
}

TEST(MembershipCore, ANewerPollEndsTheOlderAndAllEndInTime) {
  Script script(3);
  uint64_t first = script.Poll(kCoordinator.id);
  uint64_t second = script.Poll(kCoordinator.id);
  EXPECT_TRUE(script.Answered(first));
  EXPECT_FALSE(script.Answered(second));
  script.Advance(absl::Seconds(20));
  EXPECT_TRUE(script.Answered(second));
  EXPECT_TRUE(script.Events(second).empty());
}

TEST(MembershipCore, AMemberThatNeverPollsDoesNotHoardEvents) {
  MembershipCore::Options options;
  options.max_events = 8;
  Script script(4, options);
  script.Join(kA);
  for (uint64_t i = 0; i < 20; ++i) {
    script.Poll(kCoordinator.id);
    script.Heartbeat(kA.id).IgnoreError();
    Member member = MakeMember("b", 100 + i, 2);
    script.Join(member);
    script.Leave(member.id);
    script.Poll(kCoordinator.id);
  }
  EXPECT_THAT(script.Live(), ElementsAre("c"));
  ExpectStatus(script.Heartbeat(kA.id), absl::StatusCode::kFailedPrecondition, "did not fetch the last");
  script.Finish();
}

TEST(MembershipCore, WhoIsFarBehindCatchesUpAnAnswerAtATime) {
  MembershipCore::Options options;
  options.max_events_an_answer = 3;
  Script script(4, options);
  for (uint64_t i = 0; i < 4; ++i) {  // 8 events.
    Member member = MakeMember("b", 100 + i, 2);
    script.Join(member);
    script.Leave(member.id);
  }
  for (size_t expected : {3u, 3u, 2u}) {
    EXPECT_EQ(script.Events(script.Poll(kCoordinator.id)).size(), expected);
  }
  EXPECT_FALSE(script.Answered(script.Poll(kCoordinator.id)));
  script.Finish();
}

TEST(MembershipCore, WhoIsFarBehindGetsNoMoreBytesThanFitIntoAMessage) {
  MembershipCore::Options options;
  options.max_bytes_an_answer = 20000;
  Script script(4, options);
  for (uint64_t i = 0; i < 4; ++i) {  // Joins of about 1 KB, ends of about 9 KB.
    Member member = MakeMember("b", 100 + i, 2);
    member.addresses = {std::string(500, 'x'), std::string(500, 'y')};
    script.Join(member);
    script.Leave(member.id, std::string(8000, 'w'));
  }
  size_t total = 0, answers = 0;
  while (total < 8 && ++answers < 9) {
    size_t bytes = 0;
    for (const MemberEvent& event : script.Events(script.Poll(kCoordinator.id))) {
      bytes += event.reason.message().size() + 1000;
      ++total;
    }
    EXPECT_LE(bytes, 20000u);
  }
  EXPECT_EQ(total, 8u);
  // One that is larger goes alone.
  script.Join(kA);
  script.Leave(kA.id, std::string(30000, 'w'));
  EXPECT_EQ(script.Events(script.Poll(kCoordinator.id)).size(), 1u);
  EXPECT_EQ(script.Events(script.Poll(kCoordinator.id)).size(), 1u);
  script.Finish();
}

TEST(MembershipCore, PollsThatMakeNoSenseAreRefused) {
  Script script(3);
  ExpectStatus(script.Status(script.Poll(kA.id)), absl::StatusCode::kNotFound, "not a member");
  auto actions = script.core().Poll(kCoordinator.id, 99, 1000, script.clock().Now());
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<MembershipCore::PollAnswer>(actions[0]).status.code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(MembershipCore, ManyCanComeAndGoUnderOneName) {
  Script script(2);
  for (uint64_t i = 1; i <= 6000; ++i) {
    Member member = MakeMember("a", i, 1);
    ASSERT_TRUE(script.Status(script.Join(member)).ok());
    script.Leave(member.id);
    if (i % 500 == 0) script.Poll(kCoordinator.id);
  }
  script.Finish();
}

}  // namespace
}  // namespace Atoll::cluster
