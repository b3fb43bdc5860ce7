// Calls with tensors on GPUs: device maps and the order of streams, without a wait on the host by the user.
// Needs a GPU; cuda_rpc_test checks the same rules on any machine.
#include <gmock/gmock.h>

#include <atomic>
#include <thread>

#include <ATen/ops/allclose.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/synchronization/notification.h"
#include "atoll/tests/cuda/agents.h"
#include "atoll/tests/cuda/gpu.h"

namespace Atoll::cuda_test {
namespace {

using base::GetRan;
using base::Ran;
using rpc::Agent;
using rpc::Copy;
using rpc::DeviceMap;
using rpc::Lend;
using rpc::Payload;
using rpc::Received;
using rpc::ServerCall;
using ::testing::HasSubstr;

constexpr absl::Duration kHang = absl::Seconds(120);
constexpr int64_t kCount = 1 << 20;
constexpr int64_t kDelayMs = 50;

at::TensorOptions On(int device, at::ScalarType dtype = at::kInt) {
  return at::TensorOptions().dtype(dtype).device(
      c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
}
void* CurrentStream(int device) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA)
      .getStream(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)))
      .native_handle();
}
uint32_t* Data(const at::Tensor& tensor) { return static_cast<uint32_t*>(tensor.data_ptr()); }
/// A tensor that becomes `value` late, in the order of the current stream.
at::Tensor Late(int device, uint32_t value, int64_t count = kCount) {
  at::Tensor tensor = at::full({count}, -1, On(device));
  Delay(CurrentStream(device), kDelayMs);
  Fill(Data(tensor), count, value, CurrentStream(device));
  return tensor;
}
bool Is(const at::Tensor& tensor, int value) {
  at::Tensor here = tensor.cpu();
  return here.numel() > 0 && here.eq(value).all().item<bool>();
}

class AgentGpuTest : public AgentsTest {
 protected:
  void SetUp() override {
    ATOLL_NEEDS_GPU();
    Check(cudaSetDevice(0), "cudaSetDevice");
  }
  void StartTwo(DeviceMap a_to_b = {{0, 0}}) {
    a_ = &Start("a", {{"b", std::move(a_to_b)}});
    b_ = &Start("b", {});
    a_->AddPeer({b_->self(), b_->addresses()});
  }
  /// x + 1, late.
  static void ServeAdd(Agent& agent, int device) {
    Serve(agent, "add", [device](ServerCall call) {
      Delay(CurrentStream(device), kDelayMs);
      std::move(call.responder).Reply(Of({call.request.tensors[0].add(1)}));
    });
  }
};

TEST_F(AgentGpuTest, Echo) {
  StartTwo();
  ServeEcho(*b_);
  for (int64_t count : {int64_t{1}, int64_t{1000}, int64_t{16} << 20}) {
    auto reply = a_->Call("b", {"echo"}, Of({at::full({count}, 7, On(0))})).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(reply->tensors[0].is_cuda());
    EXPECT_TRUE(Is(reply->tensors[0], 7));
  }
}

TEST_F(AgentGpuTest, BetweenTheCpuAndTheGpu) {
  StartTwo({{rpc::kCpuIndex, 0}, {0, rpc::kCpuIndex}});
  ServeEcho(*b_);
  std::atomic<bool> good{false};
  Serve(*b_, "look", [&](ServerCall call) {
    good = call.request.tensors[0].is_cuda() && call.request.tensors[1].is_cpu() &&
           Is(call.request.tensors[0], 1) && Is(call.request.tensors[1], 2);
    std::move(call.responder).Reply(Payload());
  });
  ASSERT_TRUE(a_->Call("b", {"look"}, Of({at::full({100}, 1, at::kInt), Late(0, 2)})).Wait(kHang).ok());
  EXPECT_TRUE(good);
  auto reply = a_->Call("b", {"echo"}, Of({at::full({kCount}, 1, at::kInt), Late(0, 2)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->tensors[0].is_cpu() && Is(reply->tensors[0], 1));
  EXPECT_TRUE(reply->tensors[1].is_cuda() && Is(reply->tensors[1], 2));
}

TEST_F(AgentGpuTest, LateWorkIsWaitedForOnTheDevice) {
  StartTwo();
  ServeAdd(*b_, 0);
  Witness witness;
  auto reply = a_->Call("b", {"add"}, Of({Late(0, 41)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  witness.Count(Data(reply->tensors[0]), kCount, 42, CurrentStream(0));
  EXPECT_EQ(witness.differing(), 0u);
}

TEST_F(AgentGpuTest, TwentyCallsAtOnce) {
  StartTwo();
  ServeAdd(*b_, 0);
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 20; ++i) futures.push_back(a_->Call("b", {"add"}, Of({Late(0, i, 50000)})));
  for (int i = 0; i < 20; ++i) {
    auto reply = futures[i].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(Is(reply->tensors[0], i + 1)) << i;
  }
}

TEST_F(AgentGpuTest, NestedOverThreeHops) {
  Agent& a = Start("a", {{"b", {{0, 0}}}});
  Agent& b = Start("b", {{"c", {{0, 0}}}});
  Agent& c = Start("c", {});
  a.AddPeer({b.self(), b.addresses()});
  b.AddPeer({c.self(), c.addresses()});
  ServeAdd(c, 0);
  Serve(b, "forward", [&](ServerCall call) {
    Delay(CurrentStream(0), kDelayMs);
    auto inner = b.Call("c", {"add"}, Of({call.request.tensors[0].mul(2)})).Wait(kHang);
    if (!inner.ok()) return std::move(call.responder).Reply(inner.status());
    std::move(call.responder).Reply(Of({inner->tensors[0].mul(10)}));
  });
  auto reply = a.Call("b", {"forward"}, Of({Late(0, 3)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(Is(reply->tensors[0], 70));
}

TEST_F(AgentGpuTest, ACopyIsFreeAtOnceAndALoanInTheOrderOfItsStream) {
  StartTwo();
  ServeEcho(*b_);
  at::Tensor copied = Late(0, 1);
  auto first = a_->Call("b", {"echo"}, Of({copied}));
  Fill(Data(copied), kCount, 9, CurrentStream(0));
  auto reply = first.Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(Is(reply->tensors[0], 1));

  at::Tensor lent = Late(0, 2);
  absl::Notification returned;
  Payload payload;
  payload.tensors.push_back(Lend(lent, [&] {
    Fill(Data(lent), kCount, 9, CurrentStream(0));
    returned.Notify();
  }));
  reply = a_->Call("b", {"echo"}, std::move(payload)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  ASSERT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
  EXPECT_TRUE(Is(reply->tensors[0], 2));
}

TEST_F(AgentGpuTest, AReceiveComesAfterTheLastReaderOfItsTarget) {
  StartTwo();
  ServeEcho(*b_);
  Witness before;
  at::Tensor target = at::full({kCount}, 5, On(0));
  rpc::CallOptions options;
  options.reply_into = {target};
  Delay(CurrentStream(0), 2 * kDelayMs);
  before.Count(Data(target), kCount, 5, CurrentStream(0));
  auto reply = a_->Call("b", {"echo"}, Of({at::full({kCount}, 6, On(0))}), options).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(Is(target, 6));
  EXPECT_EQ(before.differing(), 0u);
}

TEST_F(AgentGpuTest, ViewsAndFiveCallsAtOnce) {
  StartTwo();
  Serve(*b_, "view", [](ServerCall call) {
    at::Tensor big = at::full({100, 200}, 0, On(0));
    big.fill_(call.request.tensors[0]);
    std::move(call.responder).Reply(Of({big[3], big.slice(1, 10, 60)}));
  });
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 5; ++i) futures.push_back(a_->Call("b", {"view"}, Of({at::full({}, i, at::kInt)})));
  for (int i = 0; i < 5; ++i) {
    auto reply = futures[i].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->tensors[0].sizes(), (at::IntArrayRef{200}));
    EXPECT_EQ(reply->tensors[1].sizes(), (at::IntArrayRef{100, 50}));
    EXPECT_TRUE(Is(reply->tensors[0], i));
    EXPECT_TRUE(Is(reply->tensors[1], i));
  }
}

TEST_F(AgentGpuTest, AConvolutionalNetElsewhereEqualsTheOneHere) {
  StartTwo();
  at::Tensor kernel = at::randn({8, 1, 5, 5}, On(0, at::kFloat)),
             weight = at::randn({10, 8 * 24 * 24}, On(0, at::kFloat));
  auto forward = [&](const at::Tensor& x) {
    return at::linear(at::relu(at::conv2d(x, kernel)).flatten(1), weight);
  };
  Serve(*b_, "forward",
        [&](ServerCall call) { std::move(call.responder).Reply(Of({forward(call.request.tensors[0])})); });
  for (int i = 0; i < 10; ++i) {
    at::Tensor batch = at::randn({200, 1, 28, 28}, On(0, at::kFloat));
    auto reply = a_->Call("b", {"forward"}, Of({batch})).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(at::allclose(reply->tensors[0], forward(batch), 1e-4, 1e-4));
  }
}

TEST_F(AgentGpuTest, ADeferredReplyFromAnotherThread) {
  StartTwo();
  std::thread other;
  Serve(*b_, "later", [&](ServerCall call) {
    at::Tensor result = call.request.tensors[0];
    Delay(CurrentStream(0), kDelayMs);
    result.add_(1);
    other = std::thread(
        [call = std::move(call), result]() mutable { std::move(call.responder).Reply(Of({result})); });
  });
  auto reply = a_->Call("b", {"later"}, Of({Late(0, 1)})).Wait(kHang);
  other.join();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(Is(reply->tensors[0], 2));
}

TEST_F(AgentGpuTest, WithoutAMapACallFailsAtOnceAndTheAgentsGoOn) {
  StartTwo({});
  ServeEcho(*b_);
  Serve(*b_, "make", [](ServerCall call) { std::move(call.responder).Reply(Of({at::full({9}, 1, On(0))})); });
  for (int i = 0; i < 9; ++i) {
    auto reply = a_->Call("b", {"echo"}, Of({at::full({9}, 1, On(0))})).Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
    EXPECT_EQ(GetRan(reply.status()), Ran::kNo);
    reply = a_->Call("b", {"make"}, {}).Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
    EXPECT_THAT(std::string(reply.status().message()), HasSubstr("cuda:0"));
  }
  EXPECT_TRUE(a_->Call("b", {"echo"}, Of({at::full({9}, 1, at::kInt)})).Wait(kHang).ok());
}

TEST_F(AgentGpuTest, ADeviceThatThePeerDoesNotHave) {
  StartTwo({{0, 99}});
  ServeEcho(*b_);
  auto reply = a_->Call("b", {"echo"}, Of({at::full({kCount}, 1, On(0))})).Wait(kHang);
  EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("cuda:99"));
  EXPECT_TRUE(a_->Call("b", {"echo"}, Of({at::full({9}, 1, at::kInt)})).Wait(kHang).ok());
}

TEST_F(AgentGpuTest, OurselvesToo) {
  Agent& a = Start("a", {});
  ServeAdd(a, 0);
  auto reply = a.Call("a", {"add"}, Of({Late(0, 1)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(Is(reply->tensors[0], 2));
}

TEST_F(AgentGpuTest, TwoDevicesCrossed) {
  if (GpuCount() < 2) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: needs two GPUs";
  StartTwo({{0, 1}, {1, 0}});
  Serve(*b_, "swap", [](ServerCall call) {
    auto& tensors = call.request.tensors;
    if (tensors[0].get_device() != 1 || tensors[1].get_device() != 0) {
      return std::move(call.responder).Reply(absl::InternalError("wrong devices"));
    }
    std::move(call.responder).Reply(Of({tensors[1].add(10), tensors[0].add(10)}));
  });
  auto reply = a_->Call("b", {"swap"}, Of({at::full({9}, 0, On(0)), at::full({9}, 1, On(1))})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->tensors[0].get_device(), 1);
  EXPECT_EQ(reply->tensors[1].get_device(), 0);
  EXPECT_TRUE(Is(reply->tensors[0], 11));
  EXPECT_TRUE(Is(reply->tensors[1], 10));
}

TEST_F(AgentGpuTest, ARingOfFourDevices) {
  if (GpuCount() < 4) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: needs four GPUs";
  StartTwo({{0, 1}, {1, 2}, {2, 3}, {3, 0}});
  Serve(*b_, "make", [](ServerCall call) {
    std::vector<at::Tensor> made;
    for (int device = 0; device < 4; ++device) made.push_back(at::full({9}, device, On(device)));
    std::move(call.responder).Reply(Of(made));
  });
  auto reply = a_->Call("b", {"make"}, {}).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  const std::vector<int> expected{3, 0, 1, 2};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(reply->tensors[i].get_device(), expected[i]);
    EXPECT_TRUE(Is(reply->tensors[i], i));
  }
}

}  // namespace
}  // namespace Atoll::cuda_test
