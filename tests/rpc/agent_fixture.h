// Two or more agents in one process: the same tests run over the fake transport and over the real one, with
// few worker threads and with many.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "atoll/rpc/agent.h"
#include "fake_transport.h"

namespace Atoll::rpc {

inline constexpr absl::Duration kHang = absl::Seconds(40);

enum class Over { kFake, kReal };

struct AgentSetup {
  AgentSetup(Over over_in, int threads_in = 2) : over(over_in), threads(threads_in) {}
  Over over;
  int threads;  // Of each agent, where the test does not say.
  friend bool operator==(const AgentSetup&, const AgentSetup&) = default;
};

// "Real16": over the real transport, with 16 threads.
inline std::string NameOf(const ::testing::TestParamInfo<AgentSetup>& info) {
  return absl::StrCat(info.param.over == Over::kFake ? "Fake" : "Real", info.param.threads);
}

#define INSTANTIATE_AGENT_TESTS(Fixture)                                                               \
  INSTANTIATE_TEST_SUITE_P(Agents, Fixture,                                                            \
                           ::testing::Values(AgentSetup{Over::kFake, 1}, AgentSetup{Over::kFake, 2},   \
                                             AgentSetup{Over::kFake, 16}, AgentSetup{Over::kReal, 1},  \
                                             AgentSetup{Over::kReal, 2}, AgentSetup{Over::kReal, 16}), \
                           NameOf)
#define INSTANTIATE_FAKE_AGENT_TESTS(Fixture)                                                        \
  INSTANTIATE_TEST_SUITE_P(Agents, Fixture,                                                          \
                           ::testing::Values(AgentSetup{Over::kFake, 1}, AgentSetup{Over::kFake, 2}, \
                                             AgentSetup{Over::kFake, 16}),                           \
                           NameOf)

// Calls that wait for an answer. Thread-safe.
class Parked {
 public:
  Handler handler() {
    return [this](ServerCall call) { Park(std::move(call.responder)); };
  }
  void Park(Responder responder) {
    absl::MutexLock lock(&mu_);
    waiting_.push_back(std::move(responder));
    ++arrived_;
  }
  // True once `count` have come in all, those taken included.
  bool Await(int count) const {
    auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return arrived_ >= count; };
    absl::MutexLock lock(&mu_);
    return mu_.AwaitWithTimeout(absl::Condition(&there), kHang);
  }
  std::vector<Responder> Take() {
    absl::MutexLock lock(&mu_);
    return std::exchange(waiting_, {});
  }

 private:
  mutable absl::Mutex mu_;
  std::vector<Responder> waiting_ ABSL_GUARDED_BY(mu_);
  int arrived_ ABSL_GUARDED_BY(mu_) = 0;
};

class AgentTest : public ::testing::TestWithParam<AgentSetup> {
 protected:
  bool fake() const { return GetParam().over == Over::kFake; }

  std::shared_ptr<transport::Endpoint> NewEndpoint(const base::MemberId& self) {
    if (fake()) return network_->CreateEndpoint(self, limits_);
    transport::EndpointOptions options;
    options.job = "agent-test";
    options.self = self;
    options.key.bytes = "a key of at least sixteen bytes";
    options.max_header_bytes = limits_.max_header_bytes;
    options.max_tensors = limits_.max_tensors;
    options.max_tensor_bytes = limits_.max_tensor_bytes;
    auto endpoint = transport::CreateEndpoint(options);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    return endpoint.ok() ? *endpoint : nullptr;
  }

  // With threads as the setup says, unless the test does.
  Agent& Start(const std::string& name) {
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    return Start(name, std::move(options));
  }
  Agent& Start(const std::string& name, AgentOptions options) {
    options.self = {name, base::NewIncarnation()};
    options.endpoint = NewEndpoint(options.self);
    if (wrap_) options.endpoint = wrap_(std::move(options.endpoint));
    auto agent = Agent::Start(options);
    EXPECT_TRUE(agent.ok()) << agent.status();
    agents_[name] = *std::move(agent);
    return *agents_[name];
  }
  void Stop(const std::string& name) { agents_.erase(name); }

  static void Introduce(Agent& a, Agent& b) {
    a.AddPeer({b.self(), b.addresses()});
    b.AddPeer({a.self(), a.addresses()});
  }

  // a serves "echo": the request comes back.
  static void ServeEcho(Agent& agent) {
    ASSERT_TRUE(agent
                    .Register({"echo"},
                              [](ServerCall call) {
                                Payload reply;
                                reply.body = call.request.body;
                                for (at::Tensor& tensor : call.request.tensors)
                                  reply.tensors.push_back(Copy(tensor));
                                std::move(call.responder).Reply(std::move(reply));
                              })
                    .ok());
  }

  // a serves "park": the call waits in parked_.
  void ServePark(Agent& agent) { ASSERT_TRUE(agent.Register({"park"}, parked_.handler()).ok()); }

  // Cuts everything between two agents, now.
  void Cut(const std::string& a, const std::string& b) {
    if (fake()) return network_->Cut(a, b);
    // All agents live in this process: so do both ends of every connection.
    for (int fd = 3; fd < 1024; ++fd) {
      sockaddr_storage address;
      socklen_t length = sizeof(address);
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0) shutdown(fd, SHUT_RDWR);
    }
  }

  // Waits (with a limit) until `condition` holds.
  static bool Eventually(const std::function<bool()>& condition) {
    absl::Time limit = absl::Now() + kHang;
    while (!condition()) {
      if (absl::Now() > limit) return false;
      std::this_thread::yield();
    }
    return true;
  }

  std::shared_ptr<FakeNetwork> network_ = FakeNetwork::Create();
  // Of the endpoints that are made from now on: what stands before them.
  std::function<std::shared_ptr<transport::Endpoint>(std::shared_ptr<transport::Endpoint>)> wrap_;
  transport::MessageLimits limits_;  // Of the endpoints that are made from now on.
  Parked parked_;                    // Outlives the agents, whose handlers fill it.
  std::map<std::string, std::unique_ptr<Agent>> agents_;
};

inline Payload Body(std::string body) {
  Payload payload;
  payload.body = std::move(body);
  return payload;
}

}  // namespace Atoll::rpc
