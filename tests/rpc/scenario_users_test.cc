// What users of other systems reported (docs/scenarios/users.md, rows 0 to 46), as it should be.
#include <dirent.h>

#include <atomic>
#include <future>
#include <thread>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include "absl/synchronization/notification.h"
#include "atoll/base/clock.h"
#include "atoll/base/status.h"
#include "scenario_ranks.h"

namespace Atoll::rpc::scenario {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = MembershipEvent::Kind;

class UsersScenario : public Ranks {
 protected:
  // Two ranks that know each other, without a membership.
  static void Introduce(Agent& a, Agent& b) {
    a.AddPeer({b.self(), b.addresses()});
    b.AddPeer({a.self(), a.addresses()});
  }
  // `body` on all of `keys` at once.
  template <class F>
  static void OnAll(const std::vector<int>& keys, F body) {
    std::vector<std::thread> threads;
    for (int key : keys) threads.emplace_back([&body, key] { body(key); });
    for (std::thread& thread : threads) thread.join();
  }
  static int Entries(const char* folder) {
    int count = 0;
    DIR* directory = opendir(folder);
    while (readdir(directory) != nullptr) ++count;
    closedir(directory);
    return count;
  }
};

// Scenario users 1.
TEST_F(UsersScenario, TwentyFourProcessesCallEachOther) {
  constexpr int kWorld = 24;
  Serve(kWorld);
  std::vector<pid_t> children;
  for (int rank = 1; rank < kWorld; ++rank) {
    children.push_back(Spawn("all", absl::StrCat("w", rank), rank, kWorld));
  }
  ASSERT_EQ(Of(0).WaitForAll(kHang), absl::OkStatus());
  for (int rank = 0; rank < kWorld; ++rank) {
    auto reply = Of(0).Call(base::Rank(rank), {"echo"}, Body("c")).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
  }
  EXPECT_EQ(Of(0).Barrier("called", kHang), absl::OkStatus());
  for (pid_t child : children) {
    const int state = Wait(child);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  }
  EXPECT_EQ(Of(0).Leave(kHang), absl::OkStatus());
}

// Scenario users 3.
TEST_F(UsersScenario, NestedCallsFromBothSidesAtOnce) {
  for (auto [threads, calls] : {std::pair(1, 1), std::pair(1, 16), std::pair(4, 16), std::pair(4, 64)}) {
    AgentOptions options;
    options.worker_threads = threads;
    RankOf a("a", options), b("b", options);
    Introduce(*a.agent, *b.agent);
    auto serve = [](Agent& self, const std::string& other) {
      return self.Register({"back"}, [&self, other](ServerCall call) {
        auto inner = self.Call(other, {"echo"}, Body(call.request.body)).Wait(kHang);
        std::move(call.responder)
            .Reply(inner.ok() ? absl::StatusOr<Payload>(Body(inner->body)) : inner.status());
      });
    };
    ASSERT_TRUE(serve(*a.agent, "b").ok());
    ASSERT_TRUE(serve(*b.agent, "a").ok());
    std::vector<base::Future<Received>> replies;
    for (int i = 0; i < calls; ++i) {
      replies.push_back(a.agent->Call("b", {"back"}, Body(absl::StrCat(i))));
      replies.push_back(b.agent->Call("a", {"back"}, Body(absl::StrCat(i))));
    }
    for (size_t i = 0; i < replies.size(); ++i) {
      auto reply = replies[i].Wait(kHang);
      ASSERT_TRUE(reply.ok()) << threads << " threads: " << reply.status();
      EXPECT_EQ(reply->body, absl::StrCat(i / 2));
    }
  }
}

// Scenario users 5.
TEST_F(UsersScenario, WhoIsThereWorksWhileOthersComeAndDie) {
  Serve(4);
  auto works = [&](int from, int to) {
    return Of(from).Call(base::Rank(to), {"echo"}, Body("")).Wait(kHang).status();
  };
  Join(1, "first", 4);
  EXPECT_EQ(works(1, 0), absl::OkStatus()) << "before the others are there";
  Join(2, "second", 4);
  Watch at_first(Of(1));
  ASSERT_TRUE(Of(1).WaitForCount(3, kHang).ok());
  EXPECT_EQ(works(2, 1), absl::OkStatus());
  const pid_t third = StartChild("join", "third", 3, 4);
  ASSERT_TRUE(Of(1).WaitForAll(kHang).ok());
  EXPECT_EQ(works(1, 3), absl::OkStatus());
  Kill(third);
  at_first.Await(Kind::kDead, "third");
  for (auto [from, to] : {std::pair(1, 0), std::pair(0, 2), std::pair(2, 1)}) {
    EXPECT_EQ(works(from, to), absl::OkStatus()) << from << " to " << to;
  }
  EXPECT_TRUE(absl::IsNotFound(works(1, 3)));
}

// Scenario users 7.
TEST_F(UsersScenario, ABusyLeaderMakesNobodyFailToLeave) {
  Serve(3);
  Join(1, "a", 3);
  Join(2, "b", 3);
  absl::Notification busy, done;
  ASSERT_TRUE(AgentOf(0)
                  .Register({"work"},
                            [&](ServerCall call) {
                              busy.Notify();
                              done.WaitForNotification();
                              std::move(call.responder).Reply(Body("done"));
                            })
                  .ok());
  auto work = Of(1).Call(base::Rank(0), {"work"}, Body(""));
  ASSERT_TRUE(busy.WaitForNotificationWithTimeout(kHang));
  EXPECT_EQ(Of(2).Leave(kHang), absl::OkStatus());
  EXPECT_EQ(Of(1).Leave(kHang), absl::OkStatus());
  done.Notify();
  EXPECT_EQ(Of(0).Leave(kHang), absl::OkStatus());
  (void)work;
}

// Scenario init 1.
// Scenario users 8.
TEST_F(UsersScenario, AHundredJobsThatEndAsSoonAsTheyBegin) {
  for (int life = 0; life < 100; ++life) {
    Serve(3);
    ranks_[1] = std::make_unique<RankOf>("a");
    ranks_[2] = std::make_unique<RankOf>("b");
    OnAll({0, 1, 2}, [&](int key) {
      if (key != 0) {
        ASSERT_EQ(TryJoin(*ranks_[key], OptionsOf(key, 3)), absl::OkStatus());
      }
      ASSERT_EQ(Of(key).WaitForAll(kHang), absl::OkStatus()) << key << " in life " << life;
      ASSERT_EQ(Of(key).Leave(kHang), absl::OkStatus()) << key << " in life " << life;
      ASSERT_EQ(AgentOf(key).Shutdown(kHang), absl::OkStatus()) << key << " in life " << life;
    });
    if (HasFailure()) return;
    ranks_.clear();
  }
}

// Scenario users 8: whoever is done before a late one has looked is not missing.
TEST_F(UsersScenario, WhoCameAndLeftInOrderIsNotMissing) {
  Serve(3);
  Join(1, "a", 3);
  ASSERT_EQ(Of(1).Leave(kHang), absl::OkStatus());
  Join(2, "b", 3);
  EXPECT_EQ(Of(2).WaitForAll(kHang), absl::OkStatus());
  EXPECT_EQ(Of(0).WaitForAll(kHang), absl::OkStatus());
  EXPECT_EQ(Of(2).Members().size(), 2u);
  // One that failed is: another may come in its place.
  Watch at_c(Of(0));
  ASSERT_EQ(Of(2).Leave(kHang, absl::InternalError("out of data")), absl::OkStatus());
  at_c.Await(Kind::kLeft, "b");
  const absl::Status status = Of(0).WaitForAll(absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("1 of 3 ranks did not come within 1ms: 2"));
}

// Scenario users 10.
TEST_F(UsersScenario, CallsThatCannotBeSentLeaveNothingInFlight) {
  AgentOptions options;
  options.max_calls_in_flight = 8;  // A leak of ten would fill it.
  RankOf a("a", options), b("b");
  Introduce(*a.agent, *b.agent);
  std::atomic<int> returned{0};
  for (int i = 0; i < 10; ++i) {
    Payload request = Body("");
    request.tensors.push_back(
        Lend(at::ones({3}).to_sparse(), [&] { ++returned; }));  // Not a layout that travels.
    const absl::Status status = a.agent->Call("b", {"echo"}, std::move(request)).Wait(kHang).status();
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(GetRan(status), Ran::kNo) << status;
  }
  std::vector<base::Future<Received>> parked;
  for (int i = 0; i < 8; ++i) parked.push_back(a.agent->Call("b", {"park"}, Body("")));
  EXPECT_TRUE(b.AwaitParked(8)) << "there is room for all";
  {
    absl::MutexLock lock(&b.parked->mu);
    for (Responder& responder : b.parked->waiting) std::move(responder).Reply(Body(""));
  }
  for (auto& call : parked) EXPECT_TRUE(call.Wait(kHang).ok());
  EXPECT_EQ(a.agent->Shutdown(kHang), absl::OkStatus());
  EXPECT_EQ(returned.load(), 10);
}

// Scenario users 14.
TEST_F(UsersScenario, TenThousandBarriersOfFour) {
  Serve(4);
  for (int rank : {1, 2, 3}) Join(rank, absl::StrCat("w", rank), 4);
  OnAll({0, 1, 2, 3}, [&](int key) {
    for (int i = 0; i < 10000; ++i) {
      if ((i * 7 + key) % 5 == 0) std::this_thread::yield();
      const absl::Status status = Of(key).Barrier("b", kHang);
      ASSERT_TRUE(status.ok()) << key << " at " << i << ": " << status;
    }
  });
}

// Scenario users 16.
TEST_F(UsersScenario, TwentyJobsInOneProcessOnOnePort) {
  int port = 0;
  auto live = [&] {
    transport::EndpointOptions endpoint;
    endpoint.port = port;
    RankOf c("c", {}, endpoint), a("a");
    port = c.agent->endpoint()->port();
    auto served = Membership::Serve(c.agent.get(), OptionsOf(0, 2));
    ASSERT_TRUE(served.ok()) << served.status();
    c.membership = *std::move(served);
    auto joined = Membership::Join(a.agent.get(), {absl::StrCat("127.0.0.1:", port)}, OptionsOf(1, 2));
    ASSERT_TRUE(joined.ok()) << joined.status();
    a.membership = *std::move(joined);
    ASSERT_TRUE(a.membership->Call(base::Rank(0), {"echo"}, Body("")).Wait(kHang).ok());
    ASSERT_EQ(a.membership->Leave(kHang), absl::OkStatus());
    ASSERT_EQ(c.membership->Leave(kHang), absl::OkStatus());
    ASSERT_EQ(a.agent->Shutdown(kHang), absl::OkStatus());
    ASSERT_EQ(c.agent->Shutdown(kHang), absl::OkStatus());
  };
  live();  // What is loaded or made once.
  const int files = Entries("/proc/self/fd");
  const int threads = Entries("/proc/self/task");
  for (int i = 0; i < 20 && !HasFailure(); ++i) live();
  EXPECT_EQ(Entries("/proc/self/fd"), files);
  // A thread that was joined may still be listed for a moment.
  const absl::Time limit = base::Now() + kHang;
  while (Entries("/proc/self/task") > threads && base::Now() < limit) std::this_thread::yield();
  EXPECT_LE(Entries("/proc/self/task"), threads);
}

// Scenario users 17.
TEST_F(UsersScenario, AConnectionMayBeIdleForHours) {
  base::FakeClock clock;
  AgentOptions options;
  options.clock = &clock;
  options.stall_limit =
      absl::InfiniteDuration();  // The first hour may begin before the last acknowledgement.
  transport::EndpointOptions endpoint;
  endpoint.clock = &clock;
  RankOf a("a", options, endpoint), b("b", options, endpoint);
  Introduce(*a.agent, *b.agent);
  ASSERT_TRUE(a.agent->Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  const uint64_t connections = b.agent->endpoint()->counters().authenticated;
  for (int hour = 0; hour < 10; ++hour) {
    clock.Advance(absl::Hours(1));
    absl::Notification ticked;  // Behind what was due before.
    a.agent->timer()->At(clock.Now(), [&] { ticked.Notify(); });
    ASSERT_TRUE(ticked.WaitForNotificationWithTimeout(kHang));
  }
  auto reply = a.agent->Call("b", {"echo"}, Body("still here")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(b.agent->endpoint()->counters().authenticated, connections)
      << "over the connection that there was";
  clock.Advance(absl::Seconds(1));  // Acknowledgements that wait.
}

// Scenario users 20.
TEST_F(UsersScenario, AnErrorKeepsItsCodeAndItsWayThroughTwoHops) {
  RankOf a("a"), b("b"), c("c");
  Introduce(*a.agent, *b.agent);
  Introduce(*b.agent, *c.agent);
  ASSERT_TRUE(c.agent
                  ->Register({"look"},
                             [](ServerCall call) {
                               std::move(call.responder).Reply(absl::OutOfRangeError("row 7 of 5"));
                             })
                  .ok());
  ASSERT_TRUE(b.agent
                  ->Register({"ask"},
                             [&](ServerCall call) {
                               auto inner = b.agent->Call("c", {"look"}, Body("")).Wait(kHang);
                               std::move(call.responder).Reply(inner.status());
                             })
                  .ok());
  const absl::Status status = a.agent->Call("b", {"ask"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsOutOfRange(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kYes);
  for (const std::string& text : {"ask v1 on " + b.agent->self().ToString(),
                                  "look v1 on " + c.agent->self().ToString(), std::string("row 7 of 5")}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

// Scenario users 21.
TEST_F(UsersScenario, ACopiedTensorMayBeOverwrittenAtOnce) {
  RankOf a("a"), b("b");
  Introduce(*a.agent, *b.agent);
  at::Tensor tensor = at::ones({20 << 20});  // 80 MiB.
  Payload request = Body("");
  request.tensors.push_back(Copy(tensor));
  auto call = a.agent->Call("b", {"echo"}, std::move(request));
  tensor.fill_(7);
  auto reply = call.Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->tensors.at(0).eq(1).all().item<bool>());
}

// Scenario users 22.
TEST_F(UsersScenario, OnlyTheBytesOfAViewTravel) {
  transport::EndpointOptions tcp;  // Whose sockets count.
  tcp.enable_unix = tcp.enable_cma = false;
  RankOf a("a", {}, tcp), b("b", {}, tcp);
  Introduce(*a.agent, *b.agent);
  ASSERT_TRUE(a.agent->Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  std::vector<at::Tensor> got;
  ASSERT_TRUE(b.agent
                  ->Register({"take"},
                             [&](ServerCall call) {
                               got = call.request.tensors;
                               std::move(call.responder).Reply(Body(""));
                             })
                  .ok());
  const at::Tensor whole = at::arange(1000 * 1000, at::kFloat).view({1000, 1000});
  const uint64_t before = a.agent->endpoint()->counters().bytes_sent;
  Payload request = Body("");
  request.tensors.push_back(Copy(whole.narrow(0, 200, 600)));
  ASSERT_TRUE(a.agent->Call("b", {"take"}, std::move(request)).Wait(kHang).ok());
  EXPECT_LE(a.agent->endpoint()->counters().bytes_sent - before, 600 * 1000 * 4 * 102 / 100);
  EXPECT_TRUE(got.at(0).equal(whole.narrow(0, 200, 600)));
  // Two views of one storage are two tensors there.
  request = Body("");
  request.tensors.push_back(Copy(whole.narrow(1, 0, 300)));
  request.tensors.push_back(Copy(whole.narrow(1, 200, 300)));
  ASSERT_TRUE(a.agent->Call("b", {"take"}, std::move(request)).Wait(kHang).ok());
  EXPECT_TRUE(got.at(0).equal(whole.narrow(1, 0, 300)));
  EXPECT_TRUE(got.at(1).equal(whole.narrow(1, 200, 300)));
  got.at(0).fill_(-1);
  EXPECT_TRUE(got.at(1).equal(whole.narrow(1, 200, 300)));
}

// Scenario users 26.
TEST_F(UsersScenario, SixteenClientsThatComeAtOnceAreAllServed) {
  RankOf server("server");
  std::vector<int> clients(16);
  for (int i = 0; i < 16; ++i) clients[i] = i;
  for (int repeat = 0; repeat < 50 && !HasFailure(); ++repeat) {
    OnAll(clients, [&](int key) {
      RankOf client(absl::StrCat("client", key));
      client.agent->AddPeer({server.agent->self(), server.agent->addresses()});
      std::vector<base::Future<Received>> replies;
      for (int i = 0; i < 3; ++i) {
        Payload request = Body(absl::StrCat(i));
        request.tensors.push_back(Copy(at::full({i == 2 ? 100000 : 10}, key)));
        replies.push_back(client.agent->Call("server", {"echo"}, std::move(request)));
      }
      for (int i = 0; i < 3; ++i) {
        auto reply = replies[i].Wait(kHang);
        ASSERT_TRUE(reply.ok()) << key << " in repeat " << repeat << ": " << reply.status();
        EXPECT_EQ(reply->body, absl::StrCat(i));
        EXPECT_TRUE(reply->tensors.at(0).eq(key).all().item<bool>());
      }
    });
  }
}

// Scenario users 32.
TEST_F(UsersScenario, ATensorWithoutElementsIsATensor) {
  RankOf a("a"), b("b");
  Introduce(*a.agent, *b.agent);
  Payload request = Body("");
  request.tensors.push_back(Copy(at::empty({0, 64})));
  request.tensors.push_back(Copy(at::ones({3})));
  request.tensors.push_back(Lend(at::empty({5, 0, 2})));
  auto reply = a.agent->Call("b", {"echo"}, std::move(request)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(reply->tensors.at(0).sizes().vec(), ElementsAre(0, 64));
  EXPECT_TRUE(reply->tensors.at(1).equal(at::ones({3})));
  EXPECT_THAT(reply->tensors.at(2).sizes().vec(), ElementsAre(5, 0, 2));
}

// Scenario users 34: behind a mapped port or a firewall, each of the two may be the only one that can connect.
TEST_F(UsersScenario, OneWhoIsOutOfTheOthersReachGetsAndSendsTensors) {
  RankOf a("a"), b("b");
  b.agent->AddPeer({a.agent->self(), {"127.0.0.1:1"}});  // Where nobody listens.
  a.agent->AddPeer({b.agent->self(), b.agent->addresses()});
  ASSERT_TRUE(a.agent->Call("b", {"echo"}, Body("first")).Wait(kHang).ok());
  const at::Tensor large = at::full({1 << 18}, 3);
  Payload request = Body("");
  request.tensors.push_back(Copy(large));
  auto reply = b.agent->Call("a", {"echo"}, std::move(request)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->tensors.at(0).equal(large));
}

// Scenario users 43.
TEST_F(UsersScenario, OneWhoLeavesIsOneEventAndNoError) {
  Serve(3);
  Join(1, "a", 3);
  Join(2, "b", 3);
  ASSERT_TRUE(Of(0).WaitForAll(kHang).ok());
  ASSERT_TRUE(Of(1).WaitForAll(kHang).ok());
  Watch at_c(Of(0)), at_a(Of(1));
  ASSERT_TRUE(Of(2).Call(base::Rank(1), {"echo"}, Body("")).Wait(kHang).ok());
  ::testing::internal::CaptureStderr();
  ASSERT_EQ(Of(2).Leave(kHang), absl::OkStatus());
  ASSERT_EQ(AgentOf(2).Shutdown(kHang), absl::OkStatus());
  at_c.Await(Kind::kLeft, "b");
  at_a.Await(Kind::kLeft, "b");
  ASSERT_TRUE(Of(1).Call(base::Rank(0), {"echo"}, Body("")).Wait(kHang).ok());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  for (const Watch* watch : {&at_a, &at_c}) {
    std::vector<std::string> about = watch->About("b");
    std::erase(about, "joined");  // Which may have been told before, or after the watch began.
    EXPECT_THAT(about, ElementsAre("left"));
  }
}

}  // namespace
}  // namespace Atoll::rpc::scenario
