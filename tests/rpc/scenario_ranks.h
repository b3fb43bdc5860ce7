// Ranks for scenarios: members in this process, and children that join, serve, and are killed or stopped.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/membership.h"
#include "membership_watch.h"

extern char** environ;

namespace Atoll::rpc::scenario {

inline constexpr absl::Duration kHang = absl::Seconds(120);
inline constexpr char kChildVariable[] =
    "ATOLL_SCENARIO_CHILD";  // "what name rank world address": see RunChild.

inline Payload Body(std::string body) {
  Payload payload;
  payload.body = std::move(body);
  return payload;
}

/// A rank: its agent, which serves "echo" and "park" (answers nobody), and its membership once it has joined.
struct RankOf {
  explicit RankOf(const std::string& name, AgentOptions options = {},
                  transport::EndpointOptions endpoint_options = {}) {
    endpoint_options.job = "scenario";
    endpoint_options.self = options.self = {name, base::NewIncarnation()};
    endpoint_options.key.bytes = "a key of at least sixteen bytes";
    auto endpoint = transport::CreateEndpoint(endpoint_options);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    if (!endpoint.ok()) return;
    options.endpoint = *endpoint;
    auto started = Agent::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    agent = *std::move(started);
    EXPECT_TRUE(agent
                    ->Register({"echo"},
                               [](ServerCall call) {
                                 Payload reply = Body(call.request.body);
                                 for (at::Tensor& tensor : call.request.tensors) {
                                   reply.tensors.push_back(Copy(tensor));
                                 }
                                 std::move(call.responder).Reply(std::move(reply));
                               })
                    .ok());
    EXPECT_TRUE(agent
                    ->Register({"park"},
                               [parked = parked](ServerCall call) {
                                 absl::MutexLock lock(&parked->mu);
                                 parked->waiting.push_back(std::move(call.responder));
                               })
                    .ok());
  }
  /// Waits until so many calls are parked.
  bool AwaitParked(size_t count) {
    auto there = [&] { return parked->waiting.size() >= count; };
    absl::MutexLock lock(&parked->mu);
    return parked->mu.AwaitWithTimeout(absl::Condition(&there), kHang);
  }

  struct Parked {
    absl::Mutex mu;
    std::vector<Responder> waiting;
  };
  std::shared_ptr<Parked> parked = std::make_shared<Parked>();
  std::unique_ptr<Agent> agent;
  std::unique_ptr<Membership> membership;
};

inline MembershipOptions OptionsOf(int rank, int world) {
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

class Ranks : public ::testing::Test {
 protected:
  void TearDown() override {
    for (pid_t child : std::set<pid_t>(children_)) {
      kill(child, SIGKILL);
      Wait(child);
    }
    // As a job ends: the coordinator last.
    while (ranks_.size() > 1) ranks_.erase(std::prev(ranks_.end()));
  }

  void Serve(MembershipOptions options, AgentOptions agent = {}) {
    ranks_.emplace(0, std::make_unique<RankOf>("c", agent));
    auto served = Membership::Serve(ranks_[0]->agent.get(), options);
    ASSERT_TRUE(served.ok()) << served.status();
    ranks_[0]->membership = *std::move(served);
  }
  void Serve(int world) { Serve(OptionsOf(0, world)); }
  absl::Status TryJoin(RankOf& rank, MembershipOptions options) {
    auto joined = Membership::Join(rank.agent.get(), ranks_[0]->agent->addresses(), options);
    if (joined.ok()) rank.membership = *std::move(joined);
    return joined.status();
  }
  /// Kept under `key`, which is also its rank unless the world is open.
  void Join(int key, const std::string& name, int world) {
    ranks_[key] = std::make_unique<RankOf>(name);
    absl::Status status =
        TryJoin(*ranks_[key], OptionsOf(world == kOpenWorld ? kAnyRank.value() : key, world));
    ASSERT_TRUE(status.ok()) << status;
  }
  Membership& Of(int key) { return *ranks_[key]->membership; }
  Agent& AgentOf(int key) { return *ranks_[key]->agent; }

  /// Starts this program again as a member (see RunChild), and waits for what it says first, in child_says_.
  pid_t StartChild(const std::string& what, const std::string& name, int rank, int world) {
    const pid_t child = Spawn(what, name, rank, world);
    HearChild(child);
    return child;
  }
  pid_t Spawn(const std::string& what, const std::string& name, int rank, int world) {
    std::string variable = absl::StrCat(kChildVariable, "=", what, " ", name, " ", rank, " ", world, " ",
                                        what == "serve" ? "-" : ranks_[0]->agent->addresses().back());
    std::vector<char*> environment;
    for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
    environment.push_back(variable.data());
    environment.push_back(nullptr);
    std::string program = "/proc/self/exe", filter = "--gtest_filter=ScenarioChild.*";
    char* arguments[] = {program.data(), filter.data(), nullptr};
    int out[2];
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], 3);
    pid_t child = 0;
    EXPECT_EQ(posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environment.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    children_.insert(child);
    hear_[child] = out[0];
    return child;
  }
  void HearChild(pid_t child) {
    char byte;
    child_says_.clear();
    while (read(hear_[child], &byte, 1) == 1 && byte != '\n') child_says_.push_back(byte);
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
    close(hear_[child]);
    hear_.erase(child);
    return state;
  }
  void Kill(pid_t child) {
    kill(child, SIGKILL);
    Wait(child);
  }

  std::map<int, std::unique_ptr<RankOf>> ranks_;
  std::set<pid_t> children_;
  std::map<pid_t, int> hear_;
  std::string child_says_;
};

/// The body of a child process: "serve" (says where it is reached) or "join" (says "joined"), and then waits to be
/// killed, or ends with 7 when its membership ends with an error; "all" calls every other member and leaves.
inline void RunChild() {
  const std::vector<std::string> words = absl::StrSplit(std::getenv(kChildVariable), ' ');
  RankOf rank(words[1]);
  const MembershipOptions options = OptionsOf(std::stoi(words[2]), std::stoi(words[3]));
  const bool serves = words[0] == "serve";
  auto membership = serves ? Membership::Serve(rank.agent.get(), options)
                           : Membership::Join(rank.agent.get(), {words[4]}, options);
  ASSERT_TRUE(membership.ok()) << membership.status();
  rank.membership = *std::move(membership);
  const std::string says = absl::StrCat(serves ? rank.agent->addresses().back() : "joined", "\n");
  ASSERT_EQ(write(3, says.data(), says.size()), static_cast<ssize_t>(says.size()));
  close(3);
  if (words[0] == "all") {
    ASSERT_TRUE(rank.membership->WaitForAll(kHang).ok());
    for (const MemberInfo& member : rank.membership->Members()) {
      auto reply = rank.membership->Call(member.rank, {"echo"}, Body(words[1])).Wait(kHang);
      ASSERT_TRUE(reply.ok()) << reply.status();
      ASSERT_EQ(reply->body, words[1]);
    }
    ASSERT_TRUE(rank.membership->Barrier("called", kHang).ok());
    ASSERT_TRUE(rank.membership->Leave(kHang).ok());
    return;
  }
  rank.membership->OnError([](absl::Status) { _exit(7); });
  while (true) pause();
}

}  // namespace Atoll::rpc::scenario
