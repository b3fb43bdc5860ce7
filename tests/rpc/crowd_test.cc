// Many processes at once, and processes that may have few open files: what fits works, and what does not ends with an
// error that says what is missing. Nothing hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "agent_fixture.h"
#include "atoll/base/log.h"
#include "storm_process.h"
#include "storm_shared.h"

namespace Atoll::rpc {
namespace {

using ::testing::HasSubstr;

constexpr int kUnixCma = 0, kUnix = 1, kTcp = 2;  // Of kStormWays.

std::unique_ptr<Agent> StartAgent(const std::string& name, int way, absl::Duration reconnect_limit) {
  const transport::EndpointOptions endpoint_options = StormEndpoint({name, base::NewIncarnation()}, way);
  auto endpoint = transport::CreateEndpoint(endpoint_options);
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  if (!endpoint.ok()) return nullptr;
  AgentOptions options;
  options.endpoint = *endpoint;
  options.self = endpoint_options.self;
  options.worker_threads = 1;
  options.reconnect_limit = reconnect_limit;
  auto agent = Agent::Start(options);
  EXPECT_TRUE(agent.ok()) << agent.status();
  return *std::move(agent);
}

std::string LineOf(const Peer& peer) {
  return absl::StrCat(peer.id.name, " ", peer.id.incarnation.value(), " ", absl::StrJoin(peer.addresses, " "),
                      "\n");
}

/// A MiB, for the bulk lane.
base::Future<Received> Take(Agent& agent, const std::string& to) {
  Payload request;
  request.tensors.push_back(Copy(at::zeros({1 << 20}, at::kByte)));
  return agent.Call(to, {"take"}, std::move(request));
}

class CrowdTest : public ::testing::Test {
 protected:
  CrowdTest() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit all{before_.rlim_max, before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &all);
    base::SetLogLevel(base::LogLevel::kError);
  }
  ~CrowdTest() override {
    base::SetLogLevel(base::LogLevel::kWarning);
    setrlimit(RLIMIT_NOFILE, &before_);
  }

  // 24 processes that may have `descriptors` each call each other; what they say of their calls that failed.
  std::vector<std::string> AllToAll(int way, int descriptors) {
    constexpr int kProcesses = 24;
    std::vector<Victim> processes;
    for (int i = 0; i < kProcesses; ++i) {
      processes.push_back(nursery_.Spawn({way, absl::StrCat("p", i), descriptors, 0, {}}));
      EXPECT_EQ(processes.back().failure(), "");
    }
    // Who tells them who is there is a peer of each, too.
    const auto agent = StartAgent("teller", way, kHang);
    std::vector<base::Future<Received>> rounds;
    for (int i = 0; i < kProcesses; ++i) {
      Payload request;
      for (int k = 0; k < kProcesses; ++k)
        if (k != i) request.body += LineOf(processes[k].peer());
      agent->AddPeer(processes[i].peer());
      CallOptions options;
      options.timeout = 2 * kHang;
      rounds.push_back(agent->Call(absl::StrCat("p", i), {"reach"}, std::move(request), options));
    }
    std::vector<std::string> errors;
    for (auto& round : rounds) {
      const auto reply = round.Wait(3 * kHang);
      if (!reply.ok()) {
        errors.push_back(reply.status().ToString());
        continue;
      }
      for (absl::string_view line : absl::StrSplit(reply->body, '\n', absl::SkipEmpty()))
        errors.emplace_back(line);
    }
    most_ = 0;
    for (const Victim& process : processes) most_ = std::max(most_, process.descriptors());
    for (Victim& process : processes) process.Signal(SIGKILL);
    return errors;
  }

  rlimit before_{};
  Nursery nursery_;
  size_t most_ = 0;
};

// All connect to all at once, both ways: for a moment that takes more than what stays.
TEST_F(CrowdTest, TwentyFourProcessesAllToAll) {
  for (int way : {kUnixCma, kTcp}) {
    EXPECT_THAT(AllToAll(way, 14 + 24 * 10 + 16), ::testing::IsEmpty());
    std::fprintf(stderr, "%s: at most %zu descriptors\n", kStormWays[way], most_);
  }
}

TEST_F(CrowdTest, WhatDoesNotFitSaysHowMuchIsNeeded) {
  const std::vector<std::string> errors = AllToAll(kTcp, 64);
  EXPECT_FALSE(errors.empty());
  EXPECT_THAT(errors,
              ::testing::Contains(HasSubstr("the limit on open files (ulimit -n) is 64: an endpoint needs")));
}

TEST_F(CrowdTest, TwoHundredCallOneServer) {
  constexpr int kClients = 200;
  Victim server = nursery_.Spawn({kUnix, "server", 0, 0, {}});
  std::vector<std::unique_ptr<Agent>> clients;
  {
    const auto first = StartAgent("first", kUnix, kHang);
    first->AddPeer(server.peer());
    ASSERT_TRUE(Take(*first, "server").Wait(kHang).ok());
  }
  const size_t few = server.descriptors();
  std::vector<base::Future<Received>> calls;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(StartAgent(absl::StrCat("client", i), kUnix, kHang));
    ASSERT_NE(clients.back(), nullptr);
    clients.back()->AddPeer(server.peer());
    calls.push_back(Take(*clients.back(), "server"));
  }
  for (auto& call : calls) {
    const auto reply = call.Wait(kHang);
    EXPECT_TRUE(reply.ok()) << reply.status();
  }
  const size_t many = server.descriptors();
  std::fprintf(stderr, "%zu descriptors for the server, %.2f a client\n", many,
               static_cast<double>(many - few) / kClients);
  clients.clear();
  const absl::Time limit = absl::Now() + kHang;
  while (server.descriptors() > few && absl::Now() < limit) poll(nullptr, 0, 1);
  EXPECT_LE(server.descriptors(), few);
}

// Each descriptor in turn is the one that is not there.
TEST_F(CrowdTest, AnyDescriptorMayBeTheLast) {
  const auto agent = StartAgent("plenty", kUnix, absl::Milliseconds(300));
  const auto tcp_agent = StartAgent("plenty", kTcp, absl::Milliseconds(300));
  for (Agent* each : {agent.get(), tcp_agent.get()}) {
    ASSERT_TRUE(
        each->Register({"take"}, [](ServerCall call) { std::move(call.responder).Reply(Payload()); }).ok());
  }
  int failed_to_start = 0, failed_to_reach = 0, failed_to_be_reached = 0, well = 0;
  for (int way : {kUnix, kTcp}) {
    Agent& plenty = way == kUnix ? *agent : *tcp_agent;
    for (int descriptors = 4; descriptors < 32; ++descriptors) {
      SCOPED_TRACE(absl::StrCat(kStormWays[way], ", ", descriptors, " descriptors"));
      Victim poor = nursery_.Spawn({way, "poor", descriptors, 0, {}});
      if (!poor.failure().empty()) {
        ++failed_to_start;
        EXPECT_THAT(poor.failure(), HasSubstr("Too many open files"));
        EXPECT_THAT(poor.failure(),
                    HasSubstr(absl::StrCat("the limit on open files (ulimit -n) is ", descriptors)));
        continue;
      }
      plenty.AddPeer(poor.peer());
      // It calls back while it is called.
      Payload request;
      request.body = LineOf({plenty.self(), plenty.addresses()});
      auto reach = plenty.Call("poor", {"reach"}, std::move(request));
      const absl::Status taken = Take(plenty, "poor").Wait(kHang).status();
      const auto reached = reach.Wait(kHang);
      EXPECT_TRUE(taken.ok() || absl::IsUnavailable(taken)) << taken;
      failed_to_be_reached += !taken.ok();
      failed_to_reach += reached.ok() && !reached->body.empty();
      well += taken.ok() && reached.ok() && reached->body.empty();
      EXPECT_TRUE(reached.ok() || absl::IsUnavailable(reached.status())) << reached.status();
    }
  }
  std::fprintf(stderr, "%d did not start, %d were not reached, %d did not reach, %d were well\n",
               failed_to_start, failed_to_be_reached, failed_to_reach, well);
  EXPECT_GT(failed_to_start, 0);
  EXPECT_GT(failed_to_be_reached, 0);
  EXPECT_GT(well, 0);
}

}  // namespace
}  // namespace Atoll::rpc
