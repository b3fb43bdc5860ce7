// The agents of a test of calls with tensors on GPUs.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "atoll/rpc/agent.h"
#include "atoll/rpc/device.h"

namespace Atoll::cuda_test {

using Maps = std::map<std::string, rpc::DeviceMap>;

inline rpc::Payload Of(std::vector<at::Tensor> tensors) {
  rpc::Payload payload;
  for (at::Tensor& tensor : tensors) payload.tensors.push_back(rpc::Copy(std::move(tensor)));
  return payload;
}

class AgentsTest : public ::testing::Test {
 protected:
  using EndpointPtr = std::shared_ptr<transport::Endpoint>;
  /// `wrap` may put something of the test's own around the agent's endpoint.
  rpc::Agent& Start(const std::string& name, Maps maps,
                    std::function<EndpointPtr(EndpointPtr)> wrap = nullptr) {
    rpc::AgentOptions options;
    options.self = {name, base::NewIncarnation()};
    options.device_maps = std::move(maps);
    transport::EndpointOptions endpoint;
    endpoint.job = "cuda-test";
    endpoint.self = options.self;
    endpoint.key.bytes = "a key of at least sixteen bytes";
    auto created = transport::CreateEndpoint(endpoint);
    EXPECT_TRUE(created.ok()) << created.status();
    options.endpoint = wrap ? wrap(*created) : *created;
    auto agent = rpc::Agent::Start(options);
    EXPECT_TRUE(agent.ok()) << agent.status();
    return *(agents_[name] = *std::move(agent));
  }
  static void Serve(rpc::Agent& agent, const std::string& name,
                    std::function<void(rpc::ServerCall)> handler) {
    ASSERT_TRUE(agent.Register({name}, std::move(handler)).ok());
  }
  static void ServeEcho(rpc::Agent& agent) {
    Serve(agent, "echo",
          [](rpc::ServerCall call) { std::move(call.responder).Reply(Of(call.request.tensors)); });
  }

  std::map<std::string, std::unique_ptr<rpc::Agent>> agents_;
  rpc::Agent* a_ = nullptr;
  rpc::Agent* b_ = nullptr;
};

}  // namespace Atoll::cuda_test
