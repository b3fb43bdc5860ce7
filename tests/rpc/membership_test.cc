// Membership over real agents and the real transport: several in this process, and child processes that are
// killed and stopped.
#include "atoll/rpc/membership.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <future>
#include <map>
#include <thread>

#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "atoll/base/clock.h"
#include "atoll/base/future.h"
#include "atoll/rpc/membership_messages.h"
#include "membership_watch.h"

extern char** environ;

namespace Atoll::rpc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = MembershipEvent::Kind;

constexpr absl::Duration kHang = absl::Seconds(60);
constexpr char kChild[] = "ATOLL_MEMBERSHIP_TEST_CHILD";  // "name rank world address...": see Child.

std::shared_ptr<transport::Endpoint> MakeEndpoint(const base::MemberId& self, int port = 0,
                                                  std::string key = "a key of at least sixteen bytes") {
  transport::EndpointOptions options;
  options.job = "membership-test";
  options.self = self;
  options.key.bytes = std::move(key);
  options.port = port;
  auto endpoint = transport::CreateEndpoint(options);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return endpoint.ok() ? *endpoint : nullptr;
}

/// A rank: its agent, and its membership once it has joined.
struct RankOf {
  explicit RankOf(const std::string& name, int port = 0,
                  std::string key = "a key of at least sixteen bytes") {
    AgentOptions options;
    options.self = {name, base::NewIncarnation()};
    options.endpoint = MakeEndpoint(options.self, port, std::move(key));
    auto started = Agent::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    agent = *std::move(started);
  }
  std::unique_ptr<Agent> agent;
  std::unique_ptr<Membership> membership;
};

MembershipOptions Options(int rank, int world) {
  MembershipOptions options;
  options.rank = base::Rank(rank);
  options.role = "worker";
  options.world_size = world;
  options.join_limit = kHang;
  return options;
}

class Watch : public MembershipWatch {
 public:
  explicit Watch(Membership& membership) : MembershipWatch(membership, kHang) {}
};

class MembershipTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
    // As a job ends: the coordinator last.
    while (ranks_.size() > 1) ranks_.erase(std::prev(ranks_.end()));
  }

  void Serve(MembershipOptions options) {
    ranks_.emplace(0, std::make_unique<RankOf>("c"));
    auto served = Membership::Serve(ranks_[0]->agent.get(), options);
    ASSERT_TRUE(served.ok()) << served.status();
    ranks_[0]->membership = *std::move(served);
  }
  void Serve(int world) { Serve(Options(0, world)); }

  absl::Status TryJoin(RankOf& rank, MembershipOptions options) {
    auto joined = Membership::Join(rank.agent.get(), ranks_[0]->agent->addresses(), options);
    if (joined.ok()) rank.membership = *std::move(joined);
    return joined.status();
  }
  void Join(int rank, const std::string& name, int world) {
    ranks_[rank] = std::make_unique<RankOf>(name);
    absl::Status status = TryJoin(*ranks_[rank], Options(rank, world));
    ASSERT_TRUE(status.ok()) << status;
  }
  Membership& Of(int rank) { return *ranks_[rank]->membership; }

  /// Starts this program again as a member; see TEST(MembershipChild ...).
  pid_t StartChild(const std::string& name, int rank, int world) {
    std::string mode = absl::StrCat(name, " ", rank, " ", world, " ",
                                    rank == 0 ? "serve" : ranks_[0]->agent->addresses().back());
    int out[2];
    EXPECT_EQ(pipe(out), 0);
    std::string variable = absl::StrCat(kChild, "=", mode);
    std::vector<char*> environment;
    for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
    environment.push_back(variable.data());
    environment.push_back(nullptr);
    std::string program = "/proc/self/exe", filter = "--gtest_filter=MembershipChild.*";
    char* arguments[] = {program.data(), filter.data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 3);
    pid_t child = 0;
    EXPECT_EQ(posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environment.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    char text[256];
    ssize_t got;
    child_says_.clear();
    while ((got = read(out[0], text, sizeof(text))) > 0 && child_says_.find('\n') == std::string::npos) {
      child_says_.append(text, static_cast<size_t>(got));
      if (child_says_.find('\n') != std::string::npos) break;
    }
    close(out[0]);
    children_.insert(child);
    return child;
  }
  // Until its last thread has stopped: the signal goes to one, which stops the others when it runs.
  void StopChild(pid_t child) {
    kill(child, SIGSTOP);
    int state = 0;
    ASSERT_EQ(waitpid(child, &state, WUNTRACED), child);
    ASSERT_TRUE(WIFSTOPPED(state)) << state;
  }
  int Wait(pid_t child) {
    int state = 0;
    EXPECT_EQ(waitpid(child, &state, 0), child);
    children_.erase(child);
    return state;
  }

  std::map<int, std::unique_ptr<RankOf>> ranks_;
  std::set<pid_t> children_;
  std::string child_says_;  // What the last one wrote: "joined", or the coordinator's address.
};

// Not a test: the body of a child process. Exits with 7 when its membership ends with an error.
TEST(MembershipChild, Runs) {
  const char* mode = std::getenv(kChild);
  if (mode == nullptr) GTEST_SKIP() << "it runs as a child of other tests";
  std::vector<std::string> words = absl::StrSplit(mode, ' ');
  RankOf rank(words[0]);
  MembershipOptions options = Options(std::stoi(words[1]), std::stoi(words[2]));
  auto membership = words[3] == "serve" ? Membership::Serve(rank.agent.get(), options)
                                        : Membership::Join(rank.agent.get(), {words[3]}, options);
  ASSERT_TRUE(membership.ok()) << membership.status();
  (*membership)->OnError([](absl::Status) { _exit(7); });
  std::string says = absl::StrCat(words[3] == "serve" ? rank.agent->addresses().back() : "joined", "\n");
  ASSERT_EQ(write(3, says.data(), says.size()), static_cast<ssize_t>(says.size()));
  close(3);
  while (true) pause();
}

// Scenario users 6.
TEST_F(MembershipTest, MembersJoinKnowEachOtherAndLeave) {
  Serve(3);
  Watch at_c(Of(0));
  Join(1, "a", 3);
  Watch at_a(Of(1));
  absl::Status missing = Of(1).WaitForAll(absl::Milliseconds(1));
  EXPECT_EQ(missing.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("1 of 3 ranks did not come within 1ms: 2"));
  Join(2, "b", 3);
  for (int rank : {0, 1, 2}) {
    ASSERT_TRUE(Of(rank).WaitForAll(kHang).ok());
    std::vector<std::string> names;
    for (const MemberInfo& member : Of(rank).Members()) names.push_back(member.id.name);
    EXPECT_THAT(names, ElementsAre("c", "a", "b"));
  }
  EXPECT_EQ(Of(1).self().rank, base::Rank(1));
  EXPECT_EQ(at_c.Await(Kind::kJoined, "a").member.role, "worker");
  at_a.Await(Kind::kJoined, "b");
  // They can call each other, whoever came first.
  ASSERT_TRUE(ranks_[1]
                  ->agent
                  ->Register({"who"},
                             [](ServerCall call) {
                               Payload reply;
                               reply.body = call.caller.name;
                               std::move(call.responder).Reply(std::move(reply));
                             })
                  .ok());
  auto reply = ranks_[2]->agent->Call("a", {"who"}, Payload()).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "b");

  ASSERT_TRUE(Of(2).Leave(kHang).ok());
  EXPECT_TRUE(at_a.Await(Kind::kLeft, "b").reason.ok());
  at_c.Await(Kind::kLeft, "b");
  EXPECT_FALSE(ranks_[1]->agent->FindPeer("b").has_value());
  EXPECT_TRUE(Of(2).status().ok());
  EXPECT_FALSE(Of(2).Barrier("late", kHang).ok());

  absl::Status early = Of(0).Leave(absl::ZeroDuration());
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(early.message()), HasSubstr("a#"));
}

TEST_F(MembershipTest, TheCoordinatorLeavesLast) {
  Serve(2);
  Join(1, "a", 2);
  std::thread other([&] {
    EXPECT_TRUE(Of(1).Barrier("end", kHang).ok());
    EXPECT_TRUE(Of(1).Leave(kHang).ok());
  });
  EXPECT_TRUE(Of(0).Barrier("end", kHang).ok());
  EXPECT_TRUE(Of(0).Leave(kHang).ok());
  other.join();
}

// Scenario init 3.
TEST_F(MembershipTest, TheSecondOfANameOrRankIsRefused) {
  Serve(3);
  Join(1, "a", 3);
  RankOf second("a");
  absl::Status status = TryJoin(second, Options(2, 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(second.agent->self().ToString()));
  EXPECT_THAT(std::string(status.message()), HasSubstr(Of(1).self().id.ToString()));
  RankOf third("b");
  status = TryJoin(third, Options(1, 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("its rank belongs to a#"));
  RankOf coordinators("c");
  status = TryJoin(coordinators, Options(2, 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(ranks_[0]->agent->self().ToString()));
  // The first is not disturbed.
  std::thread other([&] { EXPECT_TRUE(Of(1).AllGather("g", "", kHang, {"a", "c"}).ok()); });
  EXPECT_TRUE(Of(0).AllGather("g", "", kHang, {"a", "c"}).ok());
  other.join();
}

TEST_F(MembershipTest, WhatCannotBeIsRefusedAtOnce) {
  Serve(2);
  RankOf rank("a");
  EXPECT_EQ(TryJoin(rank, Options(2, 2)).code(), absl::StatusCode::kInvalidArgument);
  RankOf wide("w");
  absl::Status status = TryJoin(wide, Options(1, 3));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("comes with a world size of 3, the job's is 2"));
  RankOf stranger("s", 0, "another key of sixteen bytes");
  EXPECT_EQ(TryJoin(stranger, Options(1, 2)).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(Membership::Serve(ranks_[0]->agent.get(), Options(0, 2)).status().code(),
            absl::StatusCode::kAlreadyExists);
}

// Scenario users 28.
TEST_F(MembershipTest, AMemberMayComeBeforeTheCoordinator) {
  // A port that is ours, and where nobody listens yet.
  int reserved = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int on = 1;
  setsockopt(reserved, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(reserved, reinterpret_cast<sockaddr*>(&address), length), 0);
  getsockname(reserved, reinterpret_cast<sockaddr*>(&address), &length);
  int port = ntohs(address.sin_port);

  ranks_[1] = std::make_unique<RankOf>("a");
  MembershipOptions impatient = Options(1, 2);
  impatient.join_limit = absl::Milliseconds(100);
  std::vector<std::string> where = {absl::StrCat("127.0.0.1:", port)};
  RankOf nobody("n");
  absl::Status status = Membership::Join(nobody.agent.get(), where, impatient).status();
  // On a busy machine the limit may pass before the first refusal: either way nobody let us in.
  EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(where[0]));
  EXPECT_THAT(std::string(status.message()), HasSubstr("within 100ms"));

  std::future<absl::StatusOr<std::unique_ptr<Membership>>> joining = std::async(
      std::launch::async, [&] { return Membership::Join(ranks_[1]->agent.get(), where, Options(1, 2)); });
  close(reserved);
  ranks_[0] = std::make_unique<RankOf>("c", port);  // It listens, and serves a little later.
  auto served = Membership::Serve(ranks_[0]->agent.get(), Options(0, 2));
  ASSERT_TRUE(served.ok()) << served.status();
  ranks_[0]->membership = *std::move(served);
  auto joined = joining.get();
  ASSERT_TRUE(joined.ok()) << joined.status();
  ranks_[1]->membership = *std::move(joined);
  EXPECT_TRUE(Of(0).WaitForAll(kHang).ok());
}

// Scenario rpc 26.
TEST_F(MembershipTest, GathersOfAllAndOfSome) {
  Serve(3);
  Join(1, "a", 3);
  Join(2, "b", 3);
  auto all = [&](const std::vector<int>& ranks, auto body) {
    std::vector<std::thread> threads;
    for (int rank : ranks) threads.emplace_back([&, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  };
  for (int use = 0; use < 20; ++use) {
    all({0, 1, 2}, [&](int rank) {
      auto values = Of(rank).AllGather("g", absl::StrCat(rank, "/", use), kHang);
      ASSERT_TRUE(values.ok()) << values.status();
      EXPECT_THAT(*values,
                  ElementsAre(absl::StrCat("0/", use), absl::StrCat("1/", use), absl::StrCat("2/", use)));
    });
  }
  all({1, 2}, [&](int rank) {
    auto values = Of(rank).AllGather("g", absl::StrCat(rank), kHang, {"a", "b"});
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_THAT(*values, ElementsAre("1", "2"));
  });
  std::string big(1 << 20, 'x');
  all({0, 1, 2}, [&](int rank) {
    auto values = Of(rank).AllGather("big", big, kHang);
    ASSERT_TRUE(values.ok()) << values.status();
    EXPECT_EQ(*values, std::vector<std::string>(3, big));
  });
  EXPECT_EQ(Of(1).AllGather("big", big + "x", kHang).status().code(), absl::StatusCode::kInvalidArgument);

  absl::Status late = Of(1).Barrier("late", absl::Milliseconds(50));
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()), HasSubstr("missing at its deadline: c#"));
  EXPECT_THAT(std::string(late.message()), HasSubstr("b#"));
}

TEST_F(MembershipTest, AKilledMemberIsSeenAtOnceAndItsNameIsFree) {
  Serve(3);
  Join(1, "a", 3);
  Watch at_a(Of(1));
  pid_t child = StartChild("b", 2, 3);
  ASSERT_EQ(child_says_, "joined\n");
  ASSERT_TRUE(Of(1).WaitForAll(kHang).ok());
  base::MemberId first = at_a.Await(Kind::kJoined, "b").member.id;
  auto gather = std::async(std::launch::async, [&] { return Of(1).Barrier("g", kHang); });
  kill(child, SIGKILL);
  Wait(child);
  pid_t again = StartChild("b", 2, 3);
  EXPECT_EQ(child_says_, "joined\n") << "whether or not its old self is known to be dead";
  absl::Status status = gather.get();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(first.ToString()));
  EXPECT_THAT(std::string(at_a.Await(Kind::kDead, "b").reason.message()), HasSubstr("was declared dead"));
  EXPECT_TRUE(Of(0).WaitForAll(kHang).ok());
  kill(again, SIGKILL);
  Wait(again);
}

TEST_F(MembershipTest, WhoseOldSelfDoesNotAnswerJoinsWhenItsLeaseEnds) {
  MembershipOptions options = Options(0, 2);
  options.lease = absl::Milliseconds(2500);
  Serve(options);
  pid_t child = StartChild("a", 1, 2);
  ASSERT_EQ(child_says_, "joined\n");
  StopChild(child);  // To the others as if its host had lost its power.
  ranks_[1] = std::make_unique<RankOf>("a");
  EXPECT_EQ(TryJoin(*ranks_[1], Options(1, 2)), absl::OkStatus());
}

TEST_F(MembershipTest, WhateverAMemberSendsCountsAsLife) {
  base::FakeClock clock;
  AgentOptions options;
  options.self = {"c", base::NewIncarnation()};
  options.endpoint = MakeEndpoint(options.self);
  options.clock = &clock;
  auto coordinator = Agent::Start(options);
  ASSERT_TRUE(coordinator.ok()) << coordinator.status();
  auto membership = Membership::Serve(coordinator->get(), Options(0, 2));  // A lease of 10 s.
  ASSERT_TRUE(membership.ok()) << membership.status();

  RankOf a("a");  // Joins, and then never says to the membership that it lives.
  ASSERT_TRUE(a.agent->Meet((*coordinator)->addresses(), kHang).Wait(kHang).ok());
  Payload join;
  join.body = Encode(JoinRequest{2, base::Rank(1), "worker", a.agent->addresses()});
  auto joined = a.agent->Call("c", {kJoinMethod}, std::move(join)).Wait(kHang);
  ASSERT_TRUE(joined.ok()) << joined.status();
  for (int i = 0; i < 4; ++i) {
    clock.Advance(absl::Seconds(4));
    ASSERT_TRUE(a.agent->Call("c", {kPingMethod}, Payload()).Wait(kHang).ok());
    absl::Notification ticked;  // Behind what was due before.
    (*coordinator)->timer()->At(clock.Now(), [&] { ticked.Notify(); });
    ASSERT_TRUE(ticked.WaitForNotificationWithTimeout(kHang));
  }
  auto live = a.agent->Call("c", {kHeartbeatMethod}, Payload()).Wait(kHang);
  EXPECT_TRUE(live.ok()) << live.status();
}

// Scenario init 9.
TEST_F(MembershipTest, AStoppedMemberIsDeadByItsLeaseAndToldWhenItWakes) {
  MembershipOptions options = Options(0, 2);
  options.lease = absl::Milliseconds(1500);
  Serve(options);
  Watch at_c(Of(0));
  pid_t child = StartChild("a", 1, 2);
  ASSERT_EQ(child_says_, "joined\n");
  StopChild(child);
  EXPECT_THAT(std::string(at_c.Await(Kind::kDead, "a").reason.message()),
              HasSubstr("nothing was heard of it"));
  kill(child, SIGCONT);
  int state = Wait(child);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 7) << state;
}

TEST_F(MembershipTest, ACoordinatorThatDiesFailsWhatWaits) {
  pid_t child = StartChild("c", 0, 3);
  ASSERT_FALSE(child_says_.empty());
  child_says_.pop_back();
  RankOf rank("a");
  auto joined = Membership::Join(rank.agent.get(), {child_says_}, Options(1, 3));
  ASSERT_TRUE(joined.ok()) << joined.status();
  Watch watch(**joined);
  absl::Notification told;
  (*joined)->OnError([&](absl::Status) { told.Notify(); });
  auto gather = std::async(std::launch::async, [&] { return (*joined)->Barrier("g", kHang); });
  auto all = std::async(std::launch::async, [&] { return (*joined)->WaitForAll(kHang); });
  kill(child, SIGKILL);
  Wait(child);
  for (absl::Status status : {gather.get(), all.get()}) {
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("c#"));
  }
  watch.Await(Kind::kDead, "c");
  EXPECT_TRUE(told.WaitForNotificationWithTimeout(kHang));
  EXPECT_TRUE(absl::IsUnavailable((*joined)->status()));
  EXPECT_TRUE(absl::IsUnavailable((*joined)->Barrier("later", kHang)));
}

TEST_F(MembershipTest, ACoordinatorThatLeavesEndsItForAll) {
  Serve(2);
  Join(1, "a", 2);
  absl::Notification told;
  Of(1).OnError([&](absl::Status status) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("the coordinator c#"));
    told.Notify();
  });
  ranks_[0]->membership = nullptr;
  EXPECT_TRUE(told.WaitForNotificationWithTimeout(kHang));
  EXPECT_FALSE(Of(1).WaitForAll(kHang).ok());
}

}  // namespace
}  // namespace Atoll::rpc
