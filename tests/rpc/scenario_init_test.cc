// Starting, ending and failing: what users of other systems met (docs/scenarios/init.md), as it should be.
#include <fcntl.h>

#include <future>
#include <thread>

#include "absl/synchronization/notification.h"
#include "atoll/base/clock.h"
#include "atoll/base/status.h"
#include "atoll/transport/fault_injector.h"
#include "atoll/transport/refusal.h"
#include "scenario_ranks.h"

namespace Atoll::rpc::scenario {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = MembershipEvent::Kind;

class InitScenario : public Ranks {};

// Not a test: the body of child processes.
TEST(ScenarioChild, Runs) {
  if (std::getenv(kChildVariable) == nullptr) GTEST_SKIP() << "it runs as a child of other tests";
  RunChild();
}

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

// Scenario init 2.
TEST_F(InitScenario, OptionsThatCannotBeAreErrorsAtOnce) {
  RankOf fine("fine");
  auto expect = [](const absl::Status& status, const std::string& text) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(TextOf(status), HasSubstr(text));
  };
  auto agent_with = [&](auto change) {
    AgentOptions options;
    options.self = fine.agent->self();
    transport::EndpointOptions endpoint;
    endpoint.job = "scenario";
    endpoint.self = {"x", base::NewIncarnation()};
    endpoint.key.bytes = "a key of at least sixteen bytes";
    options.endpoint = *transport::CreateEndpoint(endpoint);
    change(options);
    return Agent::Start(options).status();
  };
  expect(agent_with([](AgentOptions& o) { o.worker_threads = 0; }), "worker_threads is 1 to 256");
  expect(agent_with([](AgentOptions& o) { o.call_timeout = absl::Seconds(-1); }), "call_timeout");
  expect(agent_with([](AgentOptions& o) { o.endpoint = nullptr; }), "needs an endpoint");
  expect(agent_with([](AgentOptions& o) { o.self.name = ""; }), "needs a name");
  auto serve_with = [&](auto change) {
    MembershipOptions options = OptionsOf(0, 2);
    change(options);
    return Membership::Serve(fine.agent.get(), options).status();
  };
  expect(serve_with([](MembershipOptions& o) { o.rank = base::Rank(2); }), "it should be from 0 to 1");
  expect(serve_with([](MembershipOptions& o) { o.rank = kAnyRank; }), "it should be from 0 to 1");
  expect(serve_with([](MembershipOptions& o) { o.world_size = -1; }), "world of -1");
  expect(serve_with([](MembershipOptions& o) { o.lease = absl::ZeroDuration(); }), "a lease should be");
  // A coordinator is there to give ranks, not to be given one.
  expect(serve_with([](MembershipOptions& o) {
           o.world_size = kOpenWorld;
           o.rank = kAnyRank;
         }),
         "rank -1 in an open world");
  CallOptions negative;
  negative.timeout = absl::Seconds(-1);
  const absl::Status late = fine.agent->Call("fine", {"echo"}, Body(""), negative).Wait(kHang).status();
  EXPECT_FALSE(late.ok());
  EXPECT_EQ(GetRan(late), Ran::kNo) << late;
}

// Scenario init 5.
TEST_F(InitScenario, AStartThatFailedHoldsUpNoLaterOne) {
  Serve(3);
  RankOf late("late");
  MembershipOptions wrong = OptionsOf(1, 3);
  wrong.role = "no word";
  EXPECT_TRUE(absl::IsInvalidArgument(TryJoin(late, wrong)));
  EXPECT_TRUE(absl::IsInvalidArgument(TryJoin(late, OptionsOf(1, 4))));
  Join(2, "b", 3);  // Others do not notice.
  EXPECT_EQ(TryJoin(late, OptionsOf(1, 3)), absl::OkStatus()) << "nor does it itself, with the right ones";
  EXPECT_TRUE(Of(0).WaitForAll(kHang).ok());
  const absl::Status twice =
      Membership::Join(late.agent.get(), ranks_[0]->agent->addresses(), OptionsOf(1, 3)).status();
  EXPECT_TRUE(absl::IsAlreadyExists(twice)) << twice;
  EXPECT_TRUE(late.membership->status().ok());
  ranks_[1] = std::make_unique<RankOf>(std::move(late));
}

// Scenario init 6.
TEST_F(InitScenario, AnOpenWorldHasNewcomersAndLeavers) {
  Serve(kOpenWorld);
  Watch at_c(Of(0));
  Join(1, "a", kOpenWorld);
  EXPECT_EQ(Of(1).self().rank, base::Rank(1));
  Join(2, "b", kOpenWorld);
  ASSERT_TRUE(Of(0).WaitForCount(3, kHang).ok());
  ASSERT_TRUE(Of(1).WaitForCount(3, kHang).ok());
  for (int from : {0, 1, 2}) {
    for (int to : {0, 1, 2}) {
      auto reply = Of(from).Call(base::Rank(to), {"echo"}, Body("x")).Wait(kHang);
      EXPECT_TRUE(reply.ok()) << from << " to " << to << ": " << reply.status();
    }
  }
  std::vector<std::future<absl::StatusOr<std::vector<std::string>>>> gathers;
  for (int key : {0, 1, 2}) {
    gathers.push_back(std::async(
        std::launch::async, [&, key] { return Of(key).AllGather("g", absl::StrCat("of ", key), kHang); }));
  }
  for (auto& gather : gathers) {
    auto values = gather.get();
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_THAT(*values, ElementsAre("of 0", "of 1", "of 2"));
  }
  absl::Status status = Of(0).WaitForCount(4, absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(TextOf(status), HasSubstr("fewer than 4 members came within 1ms: there are 3, c#"));
  EXPECT_TRUE(absl::IsInvalidArgument(Of(0).WaitForAll(kHang)));

  ASSERT_TRUE(Of(1).Leave(kHang).ok());
  EXPECT_TRUE(at_c.Await(Kind::kLeft, "a").reason.ok());
  EXPECT_EQ(Of(0).Members().size(), 2u);
  status = Of(0).Call(base::Rank(1), {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kNo);
  EXPECT_THAT(TextOf(status), HasSubstr("has left"));
  Join(3, "d", kOpenWorld);
  EXPECT_EQ(Of(3).self().rank, base::Rank(1)) << "the lowest that is free";
}

// Scenario init 7.
TEST_F(InitScenario, FixedAndOpenWorldsDoNotMix) {
  Serve(3);
  RankOf open("open");
  absl::Status status = TryJoin(open, OptionsOf(kAnyRank.value(), kOpenWorld));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(TextOf(status), HasSubstr("comes with a world size of open, the job's is 3"));
  ranks_.clear();
  Serve(kOpenWorld);
  RankOf fixed("fixed");
  status = TryJoin(fixed, OptionsOf(1, 3));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(TextOf(status), HasSubstr("comes with a world size of 3, the job's is open"));
}

// What a coordinator says of itself may mean nothing to a member: where it was reached is kept.
TEST_F(InitScenario, ACoordinatorIsKeptWhereItWasReached) {
  Serve(2);
  const std::string reached = absl::StrCat("localhost:", AgentOf(0).endpoint()->port());
  RankOf a("a");
  auto joined = Membership::Join(a.agent.get(), {reached}, OptionsOf(1, 2));
  ASSERT_TRUE(joined.ok()) << joined.status();
  std::vector<std::string> expected = AgentOf(0).addresses();
  expected.push_back(reached);
  EXPECT_EQ(a.agent->FindPeer("c")->addresses, expected);
}

TEST_F(InitScenario, MembersAreFoundByRankAndByName) {
  Serve(4);
  Join(1, "a", 4);
  Join(2, "b", 4);
  ASSERT_TRUE(Of(1).WaitForCount(3, kHang).ok());
  EXPECT_EQ(Of(1).Find(base::Rank(2))->id, Of(2).self().id);
  EXPECT_EQ(Of(1).Find("b")->rank, base::Rank(2));
  EXPECT_EQ(Of(1).Find(base::Rank(1))->id, Of(1).self().id) << "itself too";
  auto expect = [](const absl::Status& status, std::vector<std::string> texts) {
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    for (const std::string& text : texts) EXPECT_THAT(TextOf(status), HasSubstr(text));
  };
  const std::string caller = Of(1).self().id.ToString() + " (rank 1) knows no member of ";
  expect(Of(1).Find(base::Rank(3)).status(), {caller, "rank 3: nobody of that rank is there"});
  expect(Of(1).Find(base::Rank(9)).status(), {caller, "rank 9: the job's ranks are 0 to 3"});
  expect(Of(1).Find(base::Rank(-1)).status(), {caller, "rank -1"});
  expect(Of(1).Find("eve").status(), {caller, "the name 'eve': nobody of that name is there"});
  Watch at_a(Of(1));
  const std::string gone = Of(2).self().id.ToString();
  ASSERT_TRUE(Of(2).Leave(kHang).ok());
  at_a.Await(Kind::kLeft, "b");
  expect(Of(1).Find("b").status(), {caller, gone + " (rank 2) has left"});
  expect(Of(1).Find(base::Rank(2)).status(), {caller, gone + " (rank 2) has left"});

  // Calls by rank: their loans end, whether there is somebody or not; and by a name that is not known.
  for (int to : {0, 2}) {
    absl::Notification returned;
    Payload request = Body("hello");
    request.tensors.push_back(Lend(at::Tensor(), [&] { returned.Notify(); }));
    auto reply = Of(1).Call(base::Rank(to), {"echo"}, std::move(request)).Wait(kHang);
    EXPECT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
    if (to == 2) expect(reply.status(), {"calling echo v1", caller});
  }
  expect(Of(1).Send(base::Rank(2), {"echo"}, Body("")).Wait(kHang).status(), {caller});
  EXPECT_TRUE(Of(1).Send(base::Rank(0), {"echo"}, Body("")).Wait(kHang).ok());
  expect(AgentOf(1).Call("eve", {"echo"}, Body("")).Wait(kHang).status(),
         {"calling echo v1 on eve", Of(1).self().id.ToString() + " does not know it"});
  ASSERT_TRUE(Of(1).Leave(kHang).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Of(1).Find("c").status()));
}

// Scenario init 9.
TEST_F(InitScenario, AStoppedProcessIsLateAndThenAnswersAgain) {
  Serve(2);
  const pid_t child = StartChild("join", "a", 1, 2);
  ASSERT_EQ(child_says_, "joined");
  ASSERT_TRUE(Of(0).WaitForAll(kHang).ok());
  StopChild(child);
  CallOptions soon;
  soon.timeout = absl::Milliseconds(200);
  const absl::Status status = Of(0).Call(base::Rank(1), {"echo"}, Body("1"), soon).Wait(kHang).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  kill(child, SIGCONT);
  auto reply = Of(0).Call(base::Rank(1), {"echo"}, Body("2")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "2");
}

// Scenario init 10.
TEST_F(InitScenario, AKilledProcessFailsItsCallsAtOnceAndAFirstContactToo) {
  Serve(3);
  Join(2, "third", 3);
  const pid_t child = StartChild("join", "a", 1, 3);
  ASSERT_TRUE(Of(2).WaitForAll(kHang).ok());
  const Peer victim = *AgentOf(0).FindPeer("a");
  auto parked = Of(0).Call(base::Rank(1), {"park"}, Body(""));
  ASSERT_TRUE(Of(0).Call(base::Rank(1), {"echo"}, Body("")).Wait(kHang).ok());
  Kill(child);
  absl::Status status = parked.Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kMaybe);
  status = AgentOf(0).Call("a", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kNo);
  RankOf stranger("stranger");  // Knows where it was, not that it is gone.
  stranger.agent->AddPeer(victim);
  status = stranger.agent->Call("a", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(TextOf(status), HasSubstr("refused"));
}

// Scenario init 15.
// Scenario users 7.
// Scenario init 12.
TEST_F(InitScenario, ACoordinatorWaitsForNoDeadMembersAndNamesThoseThatStay) {
  Serve(4);
  const pid_t first = StartChild("join", "a", 1, 4);
  const pid_t second = StartChild("join", "b", 2, 4);
  const pid_t third = StartChild("join", "stays", 3, 4);
  ASSERT_TRUE(Of(0).WaitForAll(kHang).ok());
  for (int rank : {1, 2}) ASSERT_TRUE(Of(0).Call(base::Rank(rank), {"echo"}, Body("")).Wait(kHang).ok());
  Watch at_c(Of(0));
  Kill(first);
  Kill(second);
  at_c.Await(Kind::kDead, "a");
  at_c.Await(Kind::kDead, "b");
  StopChild(third);
  const absl::Status status = Of(0).Leave(absl::Milliseconds(300));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(TextOf(status), HasSubstr("still in the job after 300ms: stays#"));
  EXPECT_THAT(TextOf(status), ::testing::Not(HasSubstr("a#")));
  kill(third, SIGCONT);
}

// Scenario init 12.
TEST_F(InitScenario, WithNobodyLeftACoordinatorLeavesAtOnce) {
  Serve(3);
  Watch at_c(Of(0));
  for (int rank : {1, 2}) {
    const pid_t child = StartChild("join", absl::StrCat("w", rank), rank, 3);
    ASSERT_TRUE(Of(0).WaitForCount(2, kHang).ok());
    ASSERT_TRUE(Of(0).Call(base::Rank(rank), {"echo"}, Body("")).Wait(kHang).ok());
    Kill(child);
    at_c.Await(Kind::kDead, absl::StrCat("w", rank));
  }
  EXPECT_EQ(Of(0).Leave(absl::InfiniteDuration()), absl::OkStatus());
}

// Scenario init 15.
TEST_F(InitScenario, AMemberThatCannotSayItsFarewellSaysWhoDidNotAnswer) {
  ranks_.emplace(0, std::make_unique<RankOf>("unused"));
  const pid_t child = StartChild("serve", "c", 0, 2);
  RankOf rank("a");
  auto joined = Membership::Join(rank.agent.get(), {child_says_}, OptionsOf(1, 2));
  ASSERT_TRUE(joined.ok()) << joined.status();
  StopChild(child);
  const absl::Status status = (*joined)->Leave(absl::Milliseconds(200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(TextOf(status), HasSubstr("membership.leave v1 on c#"));
  kill(child, SIGCONT);
}

/// Refuses the first calls of some methods, as a network would that loses them.
class FailFirst : public Interceptor {
 public:
  explicit FailFirst(std::map<std::string, int> times) : times_(std::move(times)) {}
  absl::Status OnServe(ServerCall& call) override {
    absl::MutexLock lock(&mu_);
    auto found = times_.find(call.method.name);
    if (found == times_.end() || found->second == 0) return absl::OkStatus();
    --found->second;
    return absl::UnavailableError("lost by the test");
  }

 private:
  absl::Mutex mu_;
  std::map<std::string, int> times_ ABSL_GUARDED_BY(mu_);
};

// Scenario init 19.
TEST_F(InitScenario, KindsOfMessagesCanBeFailedSoManyTimes) {
  Serve(2);
  Join(1, "a", 2);
  ASSERT_TRUE(Of(0).WaitForAll(kHang).ok());
  AgentOf(1).AddInterceptor(std::make_shared<FailFirst>(std::map<std::string, int>{{"echo", 3}}));
  for (int i = 0; i < 3; ++i) {
    const absl::Status status = Of(0).Call(base::Rank(1), {"echo"}, Body("")).Wait(kHang).status();
    EXPECT_THAT(TextOf(status), HasSubstr("lost by the test"));
    EXPECT_EQ(GetRan(status), Ran::kNo);
  }
  EXPECT_TRUE(Of(0).Call(base::Rank(1), {"echo"}, Body("")).Wait(kHang).ok());
  AgentOf(1).AddInterceptor(std::make_shared<FailFirst>(std::map<std::string, int>{{"echo", 3}}));
  CallOptions again;
  again.retry = RetryPolicy{4, absl::Milliseconds(1), absl::Milliseconds(2)};
  EXPECT_TRUE(Of(0).Call(base::Rank(1), {"echo"}, Body(""), again).Wait(kHang).ok()) << "the fourth attempt";
}

// Scenario init 21.
TEST_F(InitScenario, ADelayedCallFailsAtItsTimeoutAndElsePasses) {
  RankOf b("b");
  auto delayed_agent = [&](const std::string& name, absl::Duration default_timeout) {
    AgentOptions options;
    options.self = {name, base::NewIncarnation()};
    options.call_timeout = default_timeout;
    transport::EndpointOptions endpoint;
    endpoint.job = "scenario";
    endpoint.self = options.self;
    endpoint.key.bytes = "a key of at least sixteen bytes";
    options.endpoint = transport::FaultInjector::Create(*transport::CreateEndpoint(endpoint),
                                                        {.delay = 1, .delay_by = absl::Milliseconds(300)});
    auto agent = *Agent::Start(options);
    agent->AddPeer({b.agent->self(), b.agent->addresses()});
    return agent;
  };
  auto call = [](Agent& agent, std::optional<absl::Duration> timeout) {
    CallOptions options;
    options.timeout = timeout;
    return agent.Call("b", {"echo"}, Body(""), options).Wait(kHang).status();
  };
  auto patient = delayed_agent("patient", kHang);
  EXPECT_TRUE(absl::IsDeadlineExceeded(call(*patient, absl::Milliseconds(100))));
  EXPECT_EQ(call(*patient, std::nullopt), absl::OkStatus());
  EXPECT_EQ(call(*patient, absl::InfiniteDuration()), absl::OkStatus());
  auto hasty = delayed_agent("hasty", absl::Milliseconds(100));
  EXPECT_TRUE(absl::IsDeadlineExceeded(call(*hasty, std::nullopt)));
  EXPECT_EQ(call(*hasty, kHang), absl::OkStatus());
  // No time at all is no time; none meant is InfiniteDuration.
  const absl::Status none = call(*patient, absl::ZeroDuration());
  EXPECT_TRUE(absl::IsDeadlineExceeded(none)) << none;
  for (auto* agent : {patient.get(), hasty.get()}) EXPECT_TRUE(agent->Shutdown(kHang).ok());
}

}  // namespace
}  // namespace Atoll::rpc::scenario
