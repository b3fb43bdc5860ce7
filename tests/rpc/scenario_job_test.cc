// Ranks, names, barriers and ends of a job that makes calls: docs/scenarios/rpc.md.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <set>
#include <thread>

#include <ATen/ops/rand.h>

#include "atoll/rpc/membership.h"
#include "scenario_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ScenarioJobTest : public ScenarioTest {
 protected:
  void TearDown() override {
    while (!members_.empty()) members_.pop_back();  // The coordinator last.
    ScenarioTest::TearDown();
  }
  // Members of one job, that learn of each other from it. worker0 is the coordinator.
  void StartJob(int world) {
    for (int rank = 0; rank < world; ++rank) {
      Agent& agent = Start(NameOfWorker(rank));
      ASSERT_TRUE(ServeOperators(&agent).ok());
      ServeEcho(agent);
      workers_.push_back(&agent);
      MembershipOptions options;
      options.rank = base::Rank(rank);
      options.role = "worker";
      options.world_size = world;
      options.join_limit = kHang;
      auto member = rank == 0 ? Membership::Serve(&agent, options)
                              : Membership::Join(&agent, W(0).addresses(), options);
      ASSERT_TRUE(member.ok()) << member.status();
      members_.push_back(*std::move(member));
    }
    for (const auto& member : members_) ASSERT_TRUE(member->WaitForAll(kHang).ok());
  }
  Membership& M(int rank) { return *members_.at(static_cast<size_t>(rank)); }
  // Runs `body` of several ranks at the same time.
  static void Together(const std::vector<int>& ranks, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank : ranks) threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  std::vector<std::unique_ptr<Membership>> members_;
};
INSTANTIATE_AGENT_TESTS(ScenarioJobTest);

// Scenario rpc 1.
TEST_P(ScenarioJobTest, CallsByNameByRankAndToOneself) {
  StartJob(4);
  const at::Tensor ones = at::ones({2, 2});
  absl::StatusOr<MemberInfo> second = M(0).Find(base::Rank(2));
  ASSERT_TRUE(second.ok()) << second.status();
  for (const std::string& to : {std::string("worker1"), second->id.name, M(0).self().id.name}) {
    EXPECT_TRUE(Add(W(0), to, ones, 1).equal(at::full({2, 2}, 2.0f))) << to;
  }
}

// Scenario rpc 2.
TEST_P(ScenarioJobTest, ARankThatIsNotThereIsNotFoundAtOnce) {
  StartJob(4);
  for (int rank : {5, 4, -1}) {
    const absl::Status status = M(1).Find(base::Rank(rank)).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_THAT(Text(status),
                AllOf(HasSubstr(W(1).self().ToString()), HasSubstr(absl::StrCat("rank ", rank))));
  }
  const absl::Status status = M(1).Find("worker5").status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr(W(1).self().ToString()), HasSubstr("'worker5'")));
}

// Scenario rpc 3.
TEST(ScenarioNames, WhatIsNoNameIsRefused) {
  for (const std::string& wrong :
       {std::string("abc*"), std::string(" "), std::string(), std::string(128, 'a')}) {
    transport::EndpointOptions options;
    options.job = "names";
    options.self = {wrong, base::NewIncarnation()};
    options.key.bytes = "a key of at least sixteen bytes";
    const absl::Status status = transport::CreateEndpoint(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("127"));
  }
}

// Scenario rpc 3.
TEST_P(ScenarioJobTest, TheLongestNameAndOneOfAllLetters) {
  Agent& longest = Start(std::string(127, 'a'));
  Agent& all_letters = Start("a:b-c_1");
  Introduce(longest, all_letters);
  ServeEcho(longest);
  ServeEcho(all_letters);
  EXPECT_TRUE(longest.Call("a:b-c_1", {"echo"}, Body("")).Wait(kHang).ok());
  EXPECT_TRUE(all_letters.Call(std::string(127, 'a'), {"echo"}, Body("")).Wait(kHang).ok());
}

// Scenario rpc 26.
TEST_P(ScenarioJobTest, EveryoneLearnsEveryonesValue) {
  StartJob(3);
  Together({0, 1, 2}, [&](int rank) {
    auto values = M(rank).AllGather("ranks", absl::StrCat(rank), kHang);
    ASSERT_TRUE(values.ok()) << values.status();
    std::map<std::string, std::string> by_name;
    for (const MemberInfo& member : M(rank).Members()) {
      by_name[member.id.name] = values->at(static_cast<size_t>(member.rank.value()));
    }
    EXPECT_EQ(by_name,
              (std::map<std::string, std::string>{{"worker0", "0"}, {"worker1", "1"}, {"worker2", "2"}}));
  });
}

// Scenario rpc 36.
TEST_P(ScenarioJobTest, OneThatLeavesWithoutABarrierHoldsUpNobody) {
  StartJob(4);
  for (int rank = 1; rank < 4; ++rank) Add(W(0), NameOfWorker(rank), at::ones({1}), 1);
  for (int rank = 1; rank < 3; ++rank) {
    EXPECT_TRUE(Add(W(3), NameOfWorker(rank), at::ones({1}), 1).equal(at::full({1}, 2.0f)));
  }
  members_.pop_back();
  EXPECT_TRUE(W(3).Shutdown(kHang).ok());
  EXPECT_TRUE(absl::IsCancelled(AddAsync(W(3), "worker1", at::ones({1}), 1).Wait(kHang).status()));
  const absl::Status gone = AddAsync(W(0), "worker3", at::ones({1}), 1).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(gone)) << gone;
  EXPECT_TRUE(Add(W(0), "worker2", at::ones({1}), 1).equal(at::full({1}, 2.0f)));
}

// Scenario rpc 37. Who has come to its end waits there, and serves: until all have.
TEST_P(ScenarioJobTest, CallsOfTheOneThatIsLateAllEndWell) {
  StartJob(4);
  Together({0, 1, 2, 3}, [&](int rank) {
    if (rank == 0) {
      std::vector<base::Future<Values>> sums;
      // The others are at their end by now or later: it makes no difference.
      for (int i = 0; i < 300; ++i) sums.push_back(AddAsync(W(0), NameOfWorker(1 + i % 3), at::ones({2}), i));
      for (size_t i = 0; i < sums.size(); ++i) {
        EXPECT_TRUE(TensorOf(sums[i].Wait(kHang)).equal(at::full({2}, 1.0f + static_cast<float>(i))));
      }
    }
    EXPECT_TRUE(M(rank).Barrier("end", kHang).ok());
    EXPECT_TRUE(M(rank).Leave(kHang).ok());
    EXPECT_TRUE(W(rank).Shutdown(kHang).ok());
  });
}

// Scenario rpc 38.
TEST_P(ScenarioJobTest, ABarrierOfSomeFromSeveralThreadsPairsItsCalls) {
  StartJob(4);
  constexpr int kThreads = 4, kUses = 5;
  const std::vector<std::string> some = {"worker0", "worker1", "worker3"};
  absl::Mutex mu;
  std::map<std::vector<std::string>, std::multiset<int>> seen;  // Who had which answer.
  std::vector<int> ranks;
  for (int i = 0; i < kThreads; ++i) ranks.insert(ranks.end(), {0, 1, 3});
  std::atomic<int> next{0};
  Together(ranks, [&](int rank) {
    for (int use = 0; use < kUses; ++use) {
      const std::string mine = absl::StrCat(rank, "/", next.fetch_add(1));
      auto values = M(rank).AllGather("some", mine, kHang, some);
      ASSERT_TRUE(values.ok()) << values.status();
      ASSERT_EQ(values->size(), 3u);
      EXPECT_THAT(*values, ::testing::Contains(mine));
      absl::MutexLock lock(&mu);
      seen[*values].insert(rank);
    }
  });
  // Each use has one call of each of the three, and they were told the same.
  EXPECT_EQ(seen.size(), static_cast<size_t>(kThreads * kUses));
  for (const auto& [values, who] : seen) EXPECT_EQ(who, (std::multiset<int>{0, 1, 3}));
}

// Scenario rpc 49.
TEST_P(ScenarioJobTest, EveryoneIsListedAndCanBeTold) {
  StartJob(4);
  ServeValues("is.it", [this](const ServerCall& call, const Values& values) -> absl::StatusOr<Values> {
    absl::StatusOr<MemberInfo> member = M(1).Find(values.at(0).toStringRef());
    if (!member.ok()) return member.status();
    return Values{static_cast<uint64_t>(values.at(1).toInt()) == member->id.incarnation.value() &&
                  values.at(2).toInt() == member->rank.value() && call.caller.name == "worker0"};
  });
  for (int rank = 0; rank < 4; ++rank) {
    const MemberInfo& self = M(rank).self();
    absl::StatusOr<MemberInfo> found = M(rank).Find(NameOfWorker(rank));
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->id, self.id);
    EXPECT_EQ(found->rank, base::Rank(rank));
    EXPECT_EQ(W(rank).FindPeer(NameOfWorker(rank))->id, self.id);
    std::set<base::MemberId> ids;
    for (const MemberInfo& member : M(rank).Members()) ids.insert(member.id);
    EXPECT_EQ(ids.size(), 4u);
    EXPECT_TRUE(ids.contains(self.id));
    // As an argument: what it is made of.
    auto same = CallValues(&W(0), "worker1", {"is.it"},
                           {self.id.name, static_cast<int64_t>(self.id.incarnation.value()),
                            int64_t{self.rank.value()}})
                    .Wait(kHang);
    ASSERT_TRUE(same.ok()) << same.status();
    EXPECT_TRUE((*same)[0].toBool());
  }
}

// Scenario rpc 50.
TEST_P(ScenarioJobTest, AJobOfOne) {
  StartJob(1);
  EXPECT_TRUE(Add(W(0), "worker0", at::ones({2}), 1).equal(at::full({2}, 2.0f)));
  EXPECT_TRUE(M(0).Barrier("alone", kHang).ok());
  EXPECT_EQ(M(0).Members().size(), 1u);
  EXPECT_TRUE(M(0).Leave(kHang).ok());
  EXPECT_TRUE(W(0).Shutdown(kHang).ok());
}

int CountThreads() {
  DIR* dir = opendir("/proc/self/task");
  int count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

class ScenarioLoadTest : public ScenarioTest {
 protected:
  void SetUp() override {
    StartWorkers(4);
    for (Agent* agent : workers_) ServeEcho(*agent);
  }
  // One light call and every 50th time a heavy one, `count` times from every worker to every other.
  void CallAllFromAll(int count) {
    std::vector<base::Future<Received>> light;
    std::vector<base::Future<Values>> heavy;
    const at::Tensor matrix = at::rand({100, 100});
    for (int i = 0; i < count; ++i) {
      for (int from = 0; from < 4; ++from) {
        for (int to = 0; to < 4; ++to) {
          if (from == to) continue;
          light.push_back(W(from).Call(NameOfWorker(to), {"echo"}, Payload()));
          if (i % 50 == 0) heavy.push_back(AddAsync(W(from), NameOfWorker(to), matrix, matrix));
        }
      }
    }
    for (auto& call : light) ASSERT_TRUE(call.Wait(kHang).ok());
    const at::Tensor sum = matrix.add(matrix);
    for (auto& call : heavy) ASSERT_TRUE(TensorOf(call.Wait(kHang)).equal(sum));
  }
};
INSTANTIATE_TEST_SUITE_P(Agents, ScenarioLoadTest,
                         ::testing::Values(AgentSetup{Over::kFake, 2}, AgentSetup{Over::kReal, 1},
                                           AgentSetup{Over::kReal, 2}, AgentSetup{Over::kReal, 16}),
                         NameOf);

// Scenario rpc 34.
TEST_P(ScenarioLoadTest, AThousandLightAndTwentyHeavyCallsFromAllToAll) {
  CallAllFromAll(20);  // What is made once.
  const int threads = CountThreads();
  CallAllFromAll(1000);
  EXPECT_LE(CountThreads(), threads);
}

// Scenario rpc 35.
TEST_P(ScenarioLoadTest, HandlersThatCallAndWaitDoNotWaitForEachOtherForEver) {
  for (Agent* agent : workers_) {
    ASSERT_TRUE(agent
                    ->Register({"busy"},
                               [this, agent](ServerCall call) {
                                 std::vector<base::Future<Values>> sums;
                                 for (int to = 0; to < 4; ++to) {
                                   sums.push_back(AddAsync(*agent, NameOfWorker(to), at::ones({4}), to));
                                 }
                                 absl::Status status;
                                 for (auto& sum : sums) {
                                   if (status.ok()) status = sum.Wait(kHang).status();
                                 }
                                 if (!status.ok()) return std::move(call.responder).Reply(status);
                                 std::move(call.responder).Reply(Payload());
                               })
                    .ok());
  }
  std::vector<base::Future<Received>> calls;
  for (int i = 0; i < 10; ++i) {
    for (int from = 0; from < 4; ++from) {
      for (int to = 0; to < 4; ++to) calls.push_back(W(from).Call(NameOfWorker(to), {"busy"}, Payload()));
    }
  }
  for (auto& call : calls) {
    const absl::Status status = call.Wait(kHang).status();
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace Atoll::rpc
