// Calls of objects with tensors on GPUs, on GPUs that are not there (tests/cuda/fake_gpu.h).
#include <algorithm>
#include <memory>

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "atoll/tests/cuda/agents.h"
#include "atoll/tests/cuda/gpu_endpoint.h"
#include "testing.h"

namespace Atoll::rref {
namespace {

using cuda_test::FakeGpu;

// Says where the tensors of its requests came, and what is in them.
class Witness : public Object {
 public:
  void Call(rpc::ServerCall call) override {
    rpc::Payload reply;
    for (const at::Tensor& tensor : call.request.tensors) {
      const float* data = tensor.const_data_ptr<float>();
      const bool whole = std::all_of(data, data + tensor.numel(), [](float value) { return value == 3; });
      reply.body += tensor.device().str() + (whole ? " whole;" : " torn;");
    }
    std::move(call.responder).Reply(std::move(reply));
  }
};

class ObjectGpuTest : public cuda_test::AgentsTest {
 protected:
  void SetUp() override {
    FakeGpu::Get();
    auto start = [this](const std::string& name, cuda_test::Maps maps) {
      return &Start(name, std::move(maps), [](EndpointPtr endpoint) {
        return std::make_shared<cuda_test::GpuEndpoint>(std::move(endpoint), FakeGpu::kGpus);
      });
    };
    a_ = start("user", {{"owner", {{0, 1}}}});
    b_ = start("owner", {});
    a_->AddPeer({b_->self(), b_->addresses()});
    b_->AddPeer({a_->self(), a_->addresses()});
    user_ = *ObjectSpace::Create(a_);
    owner_ = *ObjectSpace::Create(b_);
    auto factory = [](const base::MemberId&, rpc::Received) -> absl::StatusOr<std::shared_ptr<Object>> {
      return std::make_shared<Witness>();
    };
    ASSERT_TRUE(owner_->RegisterClass("Witness", factory).ok());
  }
  void TearDown() override {
    user_.reset();
    owner_.reset();
    agents_.clear();
  }

  std::unique_ptr<ObjectSpace> user_, owner_;
};

TEST_F(ObjectGpuTest, TensorsLandWhereTheDeviceMapSays) {
  auto rref = user_->Create("owner", "Witness", Body("")).Wait(kHang);
  ASSERT_TRUE(rref.ok()) << rref.status();
  at::Tensor on_gpu = at::empty({50000}, at::TensorOptions().device(c10::Device(c10::kCUDA, 0)));
  at::Tensor on_cpu = at::empty({50000}, at::kFloat);
  for (at::Tensor& tensor : {std::ref(on_gpu), std::ref(on_cpu)}) {
    std::fill_n(tensor.data_ptr<float>(), tensor.numel(), 3.0f);
  }
  auto reply = (*rref)->Call({"see"}, cuda_test::Of({on_gpu, on_cpu})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "cuda:1 whole;cpu whole;");
}

}  // namespace
}  // namespace Atoll::rref
