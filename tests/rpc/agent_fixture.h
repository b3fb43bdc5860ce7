// Two or more agents in one process, over the fake transport and over the real one: the same tests run on
// both.
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

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "atoll/rpc/agent.h"
#include "fake_transport.h"

namespace Atoll::rpc {

inline constexpr absl::Duration kHang = absl::Seconds(40);

enum class Over { kFake, kReal };

class AgentTest : public ::testing::TestWithParam<Over> {
 protected:
  bool fake() const { return GetParam() == Over::kFake; }

  std::shared_ptr<transport::Endpoint> NewEndpoint(const base::MemberId& self) {
    if (fake()) return network_->CreateEndpoint(self);
    transport::EndpointOptions options;
    options.job = "agent-test";
    options.self = self;
    options.key.bytes = "a key of at least sixteen bytes";
    auto endpoint = transport::CreateEndpoint(options);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    return endpoint.ok() ? *endpoint : nullptr;
  }

  Agent& Start(const std::string& name, AgentOptions options = {}) {
    options.self = {name, base::NewIncarnation()};
    options.endpoint = NewEndpoint(options.self);
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
  std::map<std::string, std::unique_ptr<Agent>> agents_;
};

inline Payload Body(std::string body) {
  Payload payload;
  payload.body = std::move(body);
  return payload;
}

}  // namespace Atoll::rpc
