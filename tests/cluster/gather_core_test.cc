#include "atoll/cluster/gather_core.h"

#include "membership_script.h"

namespace Atoll::cluster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Evidence = MembershipCore::Evidence;

const Member kC = MakeMember("c", 1, 0);
const Member kA = MakeMember("a", 0xa1, 1);
const Member kB = MakeMember("b", 0xb1, 2);
const Member kA2 = MakeMember("a", 0xa2, 1);

class GatherCoreTest : public ::testing::Test {
 protected:
  void All() {
    script_.Join(kA);
    script_.Join(kB);
  }
  void TearDown() override { script_.Finish(); }
  void Expect(uint64_t call, absl::StatusCode code, const std::string& part) {
    absl::Status status = script_.Status(call);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
  Script script_{3};
};

TEST_F(GatherCoreTest, ValuesComeByRankWhateverTheOrder) {
  All();
  std::vector<Member> order = {kC, kA, kB};
  std::sort(order.begin(), order.end(), [](const Member& x, const Member& y) { return x.id < y.id; });
  do {
    std::vector<uint64_t> calls;
    for (const Member& member : order) {
      for (uint64_t call : calls) EXPECT_FALSE(script_.Answered(call));
      calls.push_back(script_.Gather(member.id, "g", "of " + member.id.name));
    }
    for (uint64_t call : calls) EXPECT_THAT(script_.Values(call), ElementsAre("of c", "of a", "of b"));
  } while (std::next_permutation(order.begin(), order.end(),
                                 [](const Member& x, const Member& y) { return x.id < y.id; }));
}

TEST_F(GatherCoreTest, OfSomeMembersByName) {
  All();
  uint64_t b = script_.Gather(kB.id, "g", "B", {"b", "a"});
  uint64_t other = script_.Gather(kB.id, "g", "X", {"b", "c"});
  uint64_t a = script_.Gather(kA.id, "g", "A", {"a", "b", "a"});
  EXPECT_THAT(script_.Values(a), ElementsAre("A", "B"));
  EXPECT_THAT(script_.Values(b), ElementsAre("A", "B"));
  EXPECT_FALSE(script_.Answered(other)) << "other participants: another gather";
  Expect(script_.Gather(kC.id, "g", "", {"a", "b"}), absl::StatusCode::kInvalidArgument,
         "c calls it, but is not among its participants (a, b)");
}

TEST_F(GatherCoreTest, EachUseIsANewOneAndTheFastWait) {
  All();
  uint64_t a1 = script_.Gather(kA.id, "g", "a1"), a2 = script_.Gather(kA.id, "g", "a2");
  uint64_t b1 = script_.Gather(kB.id, "g", "b1");
  EXPECT_FALSE(script_.Answered(a1));
  uint64_t c1 = script_.Gather(kC.id, "g", "c1"), c2 = script_.Gather(kC.id, "g", "c2");
  uint64_t b2 = script_.Gather(kB.id, "g", "b2");
  for (uint64_t call : {a1, b1, c1}) EXPECT_THAT(script_.Values(call), ElementsAre("c1", "a1", "b1"));
  for (uint64_t call : {a2, b2, c2}) EXPECT_THAT(script_.Values(call), ElementsAre("c2", "a2", "b2"));
}

TEST_F(GatherCoreTest, AwaitsRanksThatNeverJoined) {
  script_.Join(kA);
  uint64_t a = script_.Gather(kA.id, "g", "a"), c = script_.Gather(kC.id, "g", "c");
  EXPECT_FALSE(script_.Answered(a));
  script_.Join(kB);
  script_.Gather(kB.id, "g", "b");
  EXPECT_THAT(script_.Values(a), ElementsAre("c", "a", "b"));
  EXPECT_THAT(script_.Values(c), ElementsAre("c", "a", "b"));
}

TEST_F(GatherCoreTest, ADeadlineNamesWhoIsMissingAndFailsItForAll) {
  script_.Join(kA);
  uint64_t c = script_.Gather(kC.id, "g", "c", {}, absl::Seconds(60));
  script_.Gather(kC.id, "h", "c", {"c", "late"}, absl::Seconds(3));
  uint64_t h = script_.calls();
  script_.Advance(absl::Seconds(4));
  Expect(h, absl::StatusCode::kDeadlineExceeded, "missing at its deadline: late (never joined)");
  script_.Heartbeat(kA.id).IgnoreError();
  uint64_t a = script_.Gather(kA.id, "k", "a", {"a", "c"}, absl::Seconds(2));
  script_.Advance(absl::Seconds(2));
  Expect(a, absl::StatusCode::kDeadlineExceeded, "gather 'k': missing at its deadline: c#0001 (rank 0)");
  Expect(script_.Gather(kC.id, "k", "c", {"a", "c"}), absl::StatusCode::kDeadlineExceeded, "c#0001 (rank 0)");
  uint64_t again = script_.Gather(kC.id, "k", "c", {"a", "c"});
  EXPECT_THAT(script_.Values(script_.Gather(kA.id, "k", "a", {"a", "c"})), ElementsAre("c", "a"));
  EXPECT_THAT(script_.Values(again), ElementsAre("c", "a"));
  EXPECT_FALSE(script_.Answered(c));
  script_.Gather(kA.id, "g", "a", {}, absl::Seconds(1));
  script_.Advance(absl::Seconds(1));
  Expect(c, absl::StatusCode::kDeadlineExceeded, "missing at its deadline: rank 2 (never joined)");
}

TEST_F(GatherCoreTest, ADeathFailsItForAllNamingTheDead) {
  All();
  uint64_t c = script_.Gather(kC.id, "g", "c");
  script_.Report(kC.id, kA.id, Evidence::kSeen);
  Expect(c, absl::StatusCode::kUnavailable, "gather 'g': a#00a1 (rank 1) was declared dead");
  Expect(script_.Gather(kB.id, "g", "b"), absl::StatusCode::kUnavailable, "a#00a1");
  // The survivors' next use is among themselves.
  uint64_t b = script_.Gather(kB.id, "g", "b");
  EXPECT_THAT(script_.Values(script_.Gather(kC.id, "g", "c")), ElementsAre("c", "b"));
  EXPECT_THAT(script_.Values(b), ElementsAre("c", "b"));
  Expect(script_.Gather(kC.id, "named", "", {"c", "a"}), absl::StatusCode::kUnavailable, "a#00a1");
}

TEST_F(GatherCoreTest, LeavingFailsItToo) {
  All();
  uint64_t c = script_.Gather(kC.id, "g", "c", {"a", "c"});
  script_.Leave(kA.id);
  Expect(c, absl::StatusCode::kUnavailable, "a#00a1 (rank 1) has left");
}

TEST_F(GatherCoreTest, WhoCameAndThenDiedStillCounts) {
  All();
  script_.Gather(kA.id, "g", "a");
  script_.Report(kC.id, kA.id, Evidence::kSeen);
  uint64_t c = script_.Gather(kC.id, "g", "c");
  script_.Gather(kB.id, "g", "b");
  EXPECT_THAT(script_.Values(c), ElementsAre("c", "a", "b"));
}

TEST_F(GatherCoreTest, ANewIncarnationMeetsTheNextUse) {
  All();
  uint64_t c = script_.Gather(kC.id, "g", "c1");
  script_.Report(kC.id, kA.id, Evidence::kSeen);
  EXPECT_FALSE(script_.Status(c).ok());
  script_.Join(kA2);
  uint64_t a = script_.Gather(kA2.id, "g", "a2");
  EXPECT_FALSE(script_.Answered(a)) << "the failure was not its own";
  c = script_.Gather(kC.id, "g", "c2");
  EXPECT_FALSE(script_.Status(script_.Gather(kB.id, "g", "b1")).ok());
  uint64_t b = script_.Gather(kB.id, "g", "b2");
  for (uint64_t call : {a, b, c}) EXPECT_THAT(script_.Values(call), ElementsAre("c2", "a2", "b2"));
}

TEST_F(GatherCoreTest, WhoMeetsACallThatFailedAtItsStartIsToldTheSame) {
  All();
  script_.Leave(kA.id);
  Expect(script_.Gather(kC.id, "g", "c1", {"a", "b", "c"}), absl::StatusCode::kUnavailable, "a#00a1");
  script_.Join(kA2);
  uint64_t a = script_.Gather(kA2.id, "g", "a2", {"a", "b", "c"});
  uint64_t c = script_.Gather(kC.id, "g", "c2", {"a", "b", "c"});
  Expect(script_.Gather(kB.id, "g", "b1", {"a", "b", "c"}), absl::StatusCode::kUnavailable, "a#00a1");
  uint64_t b = script_.Gather(kB.id, "g", "b2", {"a", "b", "c"});
  for (uint64_t call : {a, b, c}) EXPECT_THAT(script_.Values(call), ElementsAre("c2", "a2", "b2"));
}

TEST_F(GatherCoreTest, FailuresUnderNamesNeverUsedAgainDoNotFillIt) {
  All();
  script_.Leave(kA.id);
  for (int i = 0; i < 5000; ++i) {
    Expect(script_.Gather(kC.id, std::to_string(i), "c", {"a", "b", "c"}), absl::StatusCode::kUnavailable,
           "a#00a1");
  }
  uint64_t c = script_.Gather(kC.id, "g", "c", {"b", "c"});
  script_.Gather(kB.id, "g", "b", {"b", "c"});
  EXPECT_THAT(script_.Values(c), ElementsAre("c", "b"));
}

TEST_F(GatherCoreTest, LimitsAndStrangers) {
  All();
  Expect(script_.Gather(kA.id, "", ""), absl::StatusCode::kInvalidArgument, "its name");
  Expect(script_.Gather(kA.id, std::string(257, 'n'), ""), absl::StatusCode::kInvalidArgument, "its name");
  Expect(script_.Gather(kA.id, "g", std::string((1 << 20) + 1, 'v')), absl::StatusCode::kInvalidArgument,
         "the limit is 1048576");
  Expect(script_.Gather(kA.id, "g", "", {"a", "b", "c", "d"}), absl::StatusCode::kInvalidArgument,
         "4 participants in a world of 3");
  Expect(script_.Gather(kA2.id, "g", ""), absl::StatusCode::kNotFound, "not a member");
  script_.Leave(kB.id);
  Expect(script_.Gather(kB.id, "g", ""), absl::StatusCode::kFailedPrecondition, "has left");
}

TEST_F(GatherCoreTest, FailuresThatNobodyFetchesAreBounded) {
  All();
  for (int i = 0; i < 100; ++i) {
    script_.Gather(kC.id, "g", "", {"a", "c"}, absl::Milliseconds(1));
    script_.Advance(absl::Milliseconds(1));
  }
  int failed = 0;
  uint64_t call = script_.Gather(kA.id, "g", "", {"a", "c"});
  while (script_.Answered(call)) {
    ++failed;
    call = script_.Gather(kA.id, "g", "", {"a", "c"});
  }
  EXPECT_EQ(failed, 16);
}

TEST_F(GatherCoreTest, OpenGathersAreBounded) {
  script_.Join(kA);
  uint64_t call = 0;
  // BrokenInvariant walks all of them after each: the core itself is what is asked here.
  for (int i = 0; i < 4097; ++i) {
    call = 1'000'000 + i;
    auto actions = script_.core().Gather(kC.id, absl::StrCat("g", i), {}, "", absl::Seconds(5), call,
                                         script_.clock().Now());
    ASSERT_EQ(actions.size(), i < 4096 ? 0u : 1u);
    if (i < 4096) continue;
    EXPECT_EQ(std::get<MembershipCore::GatherAnswer>(actions[0]).status.code(),
              absl::StatusCode::kResourceExhausted);
  }
}

}  // namespace
}  // namespace Atoll::cluster
