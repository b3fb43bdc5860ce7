// Tensors on GPUs in calls, on GPUs that are not there (fake_gpu.h): where they land, what is refused, and
// that every order has been asked for. cuda_test does the same on real ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/Event.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "atoll/rpc/device.h"
#include "atoll/rpc/wire.h"
#include "atoll/tests/cuda/agents.h"
#include "atoll/tests/cuda/gpu_endpoint.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using cuda_test::Before;
using cuda_test::FakeGpu;
using cuda_test::GpuEndpoint;
using cuda_test::Maps;
using cuda_test::Of;
using cuda_test::Work;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr absl::Duration kHang = absl::Seconds(60);
constexpr int64_t kCount = 50000;  // Above what travels in the header.

at::Tensor OnGpu(int device, float value, int64_t count = kCount) {
  at::Tensor tensor = at::empty({count}, at::TensorOptions().device(c10::Device(c10::kCUDA, device)));
  std::fill_n(tensor.data_ptr<float>(), count, value);
  return tensor;
}
/// All of it is `value`; 0 stands for an error.
bool Is(const at::Tensor& tensor, float value) {
  const float* data = tensor.const_data_ptr<float>();
  return tensor.numel() > 0 &&
         std::all_of(data, data + tensor.numel(), [&](float each) { return each == value; });
}
int Index(const at::Tensor& tensor) { return tensor.device().is_cpu() ? kCpuIndex : tensor.device().index(); }

class DeviceRpcTest : public cuda_test::AgentsTest {
 protected:
  void SetUp() override { FakeGpu::Get(); }
  void TearDown() override {
    agents_.clear();
    EXPECT_FALSE(FakeGpu::Get().ever_waited_on_host());
  }
  Agent& Start(const std::string& name, Maps maps, int peers_gpus = FakeGpu::kGpus) {
    return AgentsTest::Start(name, std::move(maps), [&](EndpointPtr endpoint) {
      return std::make_shared<GpuEndpoint>(std::move(endpoint), peers_gpus);
    });
  }
  void StartTwo(DeviceMap a_to_b, int gpus_of_b = FakeGpu::kGpus) {
    a_ = &Start("a", {{"b", std::move(a_to_b)}}, gpus_of_b);
    b_ = &Start("b", {});
    a_->AddPeer({b_->self(), b_->addresses()});
  }
};

// Maps.

TEST(DeviceMapTest, WrongMapsAreRefusedAtTheStart) {
  auto refused = [](DeviceMap map, const char* why) {
    absl::Status status = CheckDeviceMaps({{"worker1", std::move(map)}}, 2);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("worker1"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refused({{2, 0}}, "there are 2 GPUs here");
  refused({{-2, 0}}, "0 or more");
  refused({{0, -2}}, "0 or more");
  refused({{0, 1000}}, "0 or more");
  refused({{0, 1}, {1, 1}}, "another device of ours");
  refused({{0, kCpuIndex}, {1, kCpuIndex}}, "another device of ours");
  refused({{kCpuIndex, kCpuIndex}}, "without a map");
  EXPECT_TRUE(
      CheckDeviceMaps({{"worker1", {{0, 1}, {1, 0}}}, {"worker2", {{kCpuIndex, 3}, {1, kCpuIndex}}}}, 2)
          .ok());
  EXPECT_TRUE(CheckDeviceMaps({}, 0).ok());
  EXPECT_FALSE(CheckDeviceMaps({{"worker1", {{0, 0}}}}, 0).ok());
}

TEST(DeviceMapTest, RepliesGoBackAndBothSidesMapsMerge) {
  EXPECT_EQ(ReplyMap({{0, 1}, {1, 0}}, {}), (DeviceMap{{1, 0}, {0, 1}}));
  EXPECT_EQ(ReplyMap({{0, 2}}, {{2, 5}, {3, 4}}), (DeviceMap{{2, 0}, {3, 4}}));
  EXPECT_EQ(ReplyMap({{kCpuIndex, 1}}, {}), (DeviceMap{{1, kCpuIndex}}));
}

TEST(DeviceMapTest, WhereATensorLands) {
  Destination to{{{0, 1}, {2, kCpuIndex}}, {"worker1", {}}, false};
  EXPECT_EQ(LandingOf(to, c10::Device("cuda:0"))->str(), "cuda:1");
  EXPECT_EQ(LandingOf(to, c10::Device("cuda:2"))->str(), "cpu");
  EXPECT_EQ(LandingOf(to, c10::Device("cpu"))->str(), "cpu");
  auto refused = LandingOf(to, c10::Device("cuda:1"));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("cuda:1"));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("worker1"));
  to.map[kCpuIndex] = 3;
  EXPECT_EQ(LandingOf(to, c10::Device("cpu"))->str(), "cuda:3");
}

// The wire.

TEST(DeviceWireTest, MapsAndDevicesTravel) {
  Hello hello;
  hello.device_map = {{kCpuIndex, 3}, {0, 1}, {2, kCpuIndex}};
  auto header = Decode(EncodeHello(hello), {});
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->hello.device_map, hello.device_map);

  TensorMeta on_gpu{at::kFloat, {4, 5}, c10::Device("cuda:3")},
      empty_on_gpu{at::kHalf, {0}, c10::Device("cuda:1")};
  const char nothing = 0;
  std::string bytes =
      EncodeRequest({"m"}, absl::Seconds(1), false, {}, "body", {{on_gpu}, {empty_on_gpu, &nothing}});
  header = Decode(bytes, {80});
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].meta.device, on_gpu.device);
  EXPECT_EQ(header->tensors[1].meta.device, empty_on_gpu.device);
  EXPECT_EQ(WhatOf(bytes), What::kRequest);
  SetCall(bytes.data(), 77, 1);
  EXPECT_EQ(CallOf(bytes), 77u);
}

TEST(DeviceWireTest, OddDevicesAreRefused) {
  float value = 1;
  std::string bytes =
      EncodeRequest({"m"}, absl::Seconds(1), false, {}, "", {{TensorMeta{at::kFloat, {1}}, &value}});
  ASSERT_TRUE(Decode(bytes, {}).ok());
  // device i8 | dims u8 | size i64 | value f32 are the last 14 bytes.
  for (int device : {0, 7, -2, -128}) {
    bytes[bytes.size() - 14] = static_cast<char>(device);
    EXPECT_FALSE(Decode(bytes, {}).ok()) << device;
  }
  Hello hello;
  hello.device_map = {{0, 1}};
  std::string greeting = EncodeHello(hello);
  greeting[greeting.size() - 1] = static_cast<char>(-2);
  EXPECT_FALSE(Decode(greeting, {}).ok());
}

// Where tensors land.

TEST_F(DeviceRpcTest, ToTheMappedDevicesAndBack) {
  StartTwo({{0, 1}, {1, 0}});
  Serve(*b_, "swap", [](ServerCall call) {
    auto& tensors = call.request.tensors;
    const bool good =
        Index(tensors[0]) == 1 && Is(tensors[0], 3) && Index(tensors[1]) == 0 && Is(tensors[1], 4);
    if (!good) return std::move(call.responder).Reply(absl::InternalError("wrong devices or values"));
    std::move(call.responder).Reply(Of({OnGpu(0, 5), OnGpu(1, 6)}));
  });
  auto reply = a_->Call("b", {"swap"}, Of({OnGpu(0, 3), OnGpu(1, 4)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(Index(reply->tensors[0]), 1);
  EXPECT_TRUE(Is(reply->tensors[0], 5));
  EXPECT_EQ(Index(reply->tensors[1]), 0);
  EXPECT_TRUE(Is(reply->tensors[1], 6));
}

TEST_F(DeviceRpcTest, RepliesMadeOnEveryDeviceComeBackTheOtherWay) {
  StartTwo({{0, 1}, {1, 2}, {2, 3}, {3, 0}});
  Serve(*b_, "make", [](ServerCall call) {
    std::move(call.responder).Reply(Of({OnGpu(0, 1), OnGpu(1, 2), OnGpu(2, 3), OnGpu(3, 4)}));
  });
  auto reply = a_->Call("b", {"make"}, Of({at::full({3}, 1.0f)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  std::vector<int> devices;
  for (const at::Tensor& tensor : reply->tensors) devices.push_back(Index(tensor));
  EXPECT_EQ(devices, (std::vector<int>{3, 0, 1, 2}));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(Is(reply->tensors[i], i + 1));
}

TEST_F(DeviceRpcTest, BetweenTheCpuAndAGpu) {
  StartTwo({{kCpuIndex, 2}, {0, kCpuIndex}});
  std::atomic<bool> good{false};
  Serve(*b_, "both", [&](ServerCall call) {
    auto& tensors = call.request.tensors;
    good = Index(tensors[0]) == 2 && Is(tensors[0], 1) && Index(tensors[1]) == kCpuIndex && Is(tensors[1], 2);
    std::move(call.responder).Reply(Of({tensors[0], tensors[1]}));
  });
  // A small one too: what lands on a GPU is not put into the header.
  for (int64_t count : {kCount, int64_t{5}}) {
    auto reply = a_->Call("b", {"both"}, Of({at::full({count}, 1.0f), OnGpu(0, 2, count)})).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(good);
    EXPECT_EQ(Index(reply->tensors[0]), kCpuIndex);
    EXPECT_TRUE(Is(reply->tensors[0], 1));
    EXPECT_EQ(Index(reply->tensors[1]), 0);
    EXPECT_TRUE(Is(reply->tensors[1], 2));
  }
}

TEST_F(DeviceRpcTest, EmptyAndUnevenTensors) {
  StartTwo({{0, 3}});
  ServeEcho(*b_);
  at::Tensor base = OnGpu(0, 0, 60000);
  for (int64_t i = 0; i < base.numel(); ++i) base.data_ptr<float>()[i] = i;
  at::Tensor turned = base.view({300, 200}).transpose(0, 1);
  auto reply = a_->Call("b", {"echo"}, Of({OnGpu(0, 0, 0), turned})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(Index(reply->tensors[0]), 0);
  EXPECT_EQ(reply->tensors[0].numel(), 0);
  ASSERT_EQ(reply->tensors[1].sizes(), turned.sizes());
  const float* data = reply->tensors[1].const_data_ptr<float>();
  for (int64_t row = 0; row < 200; ++row) {
    for (int64_t column = 0; column < 300; ++column) ASSERT_EQ(data[row * 300 + column], column * 200 + row);
  }
}

// What is refused, more often than there are threads: the agents survive it.

TEST_F(DeviceRpcTest, ATensorWithoutAMapFailsItsCallAtOnce) {
  StartTwo({{0, 1}});
  ServeEcho(*b_);
  for (int i = 0; i < 9; ++i) {
    auto reply =
        a_->Call("b", {"echo"}, Of({OnGpu(2, 1)}), {.timeout = absl::InfiniteDuration(), .reply_into = {}})
            .Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
    EXPECT_EQ(GetRan(reply.status()), Ran::kNo);
    EXPECT_THAT(std::string(reply.status().message()), HasSubstr("cuda:2"));
    EXPECT_THAT(std::string(reply.status().message()), HasSubstr("lands at b#"));
    auto sent = a_->Send("b", {"echo"}, Of({OnGpu(2, 1)})).Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(sent.status())) << sent.status();
  }
  EXPECT_TRUE(a_->Call("b", {"echo"}, Of({OnGpu(0, 1)})).Wait(kHang).ok());
}

TEST_F(DeviceRpcTest, AReplyWithoutAMapSaysSo) {
  StartTwo({{0, 1}});
  Serve(*b_, "make", [](ServerCall call) { std::move(call.responder).Reply(Of({OnGpu(2, 1)})); });
  ServeEcho(*b_);
  for (int i = 0; i < 9; ++i) {
    auto reply = a_->Call("b", {"make"}, {}).Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
    EXPECT_EQ(GetRan(reply.status()), Ran::kYes);
    EXPECT_THAT(std::string(reply.status().message()), HasSubstr("cuda:2"));
    EXPECT_THAT(std::string(reply.status().message()), HasSubstr("a reply with it lands at a#"));
  }
  EXPECT_TRUE(a_->Call("b", {"echo"}, Of({OnGpu(0, 1)})).Wait(kHang).ok());
}

TEST_F(DeviceRpcTest, ADeviceThatThePeerDoesNotHaveFailsTheCallAndThePipeStays) {
  StartTwo({{0, 1}, {1, 0}}, /*gpus_of_b=*/1);
  ServeEcho(*b_);
  Serve(*b_, "count", [count = std::make_shared<std::atomic<int>>(0)](ServerCall call) {
    Payload reply;
    reply.body = absl::StrCat(++*count);
    std::move(call.responder).Reply(std::move(reply));
  });
  for (int i = 0; i < 3; ++i) {
    auto reply = a_->Call("b", {"count"}, Of({OnGpu(0, 1)})).Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
    EXPECT_EQ(GetRan(reply.status()), Ran::kNo);
    EXPECT_THAT(std::string(reply.status().message()), HasSubstr("no channel leads to cuda:1"));
    absl::Notification returned;
    Payload lent;
    lent.tensors.push_back(Lend(OnGpu(0, 1), [&] { returned.Notify(); }));
    auto sent = a_->Send("b", {"count"}, std::move(lent)).Wait(kHang);
    EXPECT_TRUE(absl::IsFailedPrecondition(sent.status())) << sent.status();
    EXPECT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
  }
  auto reply = a_->Call("b", {"echo"}, Of({OnGpu(1, 7)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(Is(reply->tensors[0], 7));
  reply = a_->Call("b", {"count"}, {}).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "1");
}

TEST_F(DeviceRpcTest, MemoryOnAnotherDeviceThanTheReplyIsRefused) {
  StartTwo({{0, 1}});
  ServeEcho(*b_);
  CallOptions options;
  options.reply_into = {OnGpu(2, 0)};
  auto reply = a_->Call("b", {"echo"}, Of({OnGpu(0, 1)}), options).Wait(kHang);
  EXPECT_TRUE(absl::IsFailedPrecondition(reply.status())) << reply.status();
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("on cuda:2 where"));
}

// Order.

TEST_F(DeviceRpcTest, EachReaderComesAfterItsWriterAllTheWay) {
  StartTwo({{0, 1}});
  FakeGpu& gpu = FakeGpu::Get();
  const Work made = gpu.LaunchHere(0);
  Before seen;
  std::atomic<Work> handled{0};
  std::atomic<bool> pool_stream{false};
  Serve(*b_, "work", [&](ServerCall call) {
    seen = gpu.Here(1);
    pool_stream = gpu.Current(1).id() != 0;
    handled = gpu.LaunchHere(1);
    std::move(call.responder).Reply(Of({call.request.tensors[0]}));
  });
  auto reply = a_->Call("b", {"work"}, Of({OnGpu(0, 1)})).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(seen, Contains(made));
  EXPECT_TRUE(pool_stream);
  // This thread took it out of a future, and its own stream is the default one.
  EXPECT_EQ(gpu.Current(0).id(), 0);
  EXPECT_THAT(gpu.Here(0), Contains(handled.load()));
  EXPECT_THAT(gpu.KeptFor(reply->tensors[0]), Contains(0));
}

TEST_F(DeviceRpcTest, TheCallbackRunsOnTheStreamsOfTheReply) {
  StartTwo({{0, 1}});
  FakeGpu& gpu = FakeGpu::Get();
  std::atomic<Work> handled{0};
  Serve(*b_, "work", [&](ServerCall call) {
    handled = gpu.LaunchHere(1);
    std::move(call.responder).Reply(Of({call.request.tensors[0]}));
  });
  for (bool in_line : {false, true}) {
    absl::Notification done;
    a_->Call("b", {"work"}, Of({OnGpu(0, 1)}), {.reply_into = {}, .reply_inline = in_line},
             [&](absl::StatusOr<Received> reply) {
               EXPECT_TRUE(reply.ok()) << reply.status();
               EXPECT_NE(gpu.Current(0).id(), 0);
               EXPECT_THAT(gpu.Here(0), Contains(handled.load()));
               done.Notify();
             });
    ASSERT_TRUE(done.WaitForNotificationWithTimeout(kHang));
  }
}

TEST_F(DeviceRpcTest, ALoanEndsInTheOrderOfItsStream) {
  StartTwo({{0, 1}});
  FakeGpu& gpu = FakeGpu::Get();
  Serve(*b_, "take", [&](ServerCall call) { std::move(call.responder).Reply(Payload()); });
  const c10::Stream mine = gpu.Fresh(0);
  at::Tensor tensor = OnGpu(0, 1);
  absl::Notification returned;
  std::atomic<bool> on_mine{false};
  Before at_return;
  Work made = 0;
  {
    StreamScope scope({mine});
    made = gpu.Launch(mine);
    Payload payload;
    payload.tensors.push_back(Lend(tensor, [&] {
      on_mine = gpu.Current(0) == mine;
      at_return = gpu.On(mine);
      returned.Notify();
    }));
    ASSERT_TRUE(a_->Call("b", {"take"}, std::move(payload)).Wait(kHang).ok());
  }
  ASSERT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
  EXPECT_TRUE(on_mine);
  // `made` was the last of ours; the copy out was launched after it, on a stream of LibTorch's pool.
  EXPECT_GT(*at_return.rbegin(), made);
  EXPECT_FALSE(gpu.KeptFor(tensor).empty());
}

TEST_F(DeviceRpcTest, ACopyIsFreeWhenCallReturns) {
  StartTwo({{0, 1}});
  std::atomic<bool> good{false};
  Serve(*b_, "take", [&](ServerCall call) {
    good = Is(call.request.tensors[0], 1);
    std::move(call.responder).Reply(Payload());
  });
  at::Tensor tensor = OnGpu(0, 1);
  auto future = a_->Call("b", {"take"}, Of({tensor}));
  std::fill_n(tensor.data_ptr<float>(), kCount, 2.0f);
  ASSERT_TRUE(future.Wait(kHang).ok());
  EXPECT_TRUE(good);
}

TEST_F(DeviceRpcTest, AReceiveComesAfterTheLastReaderOfItsTarget) {
  StartTwo({{0, 1}});
  FakeGpu& gpu = FakeGpu::Get();
  ServeEcho(*b_);
  const Work read = gpu.LaunchHere(0);
  CallOptions options;
  options.reply_into = {OnGpu(0, 0)};
  absl::Notification done;
  Before when_landed;
  a_->Call("b", {"echo"}, Of({OnGpu(0, 9)}), options, [&](absl::StatusOr<Received> reply) {
    EXPECT_TRUE(reply.ok()) << reply.status();
    when_landed = gpu.Here(0);  // Of the stream that received it.
    done.Notify();
  });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kHang));
  EXPECT_THAT(when_landed, Contains(read));
  EXPECT_TRUE(Is(options.reply_into[0], 9));
  EXPECT_FALSE(gpu.KeptFor(options.reply_into[0]).empty());
}

TEST_F(DeviceRpcTest, TheHookAllocatesOnTheStreamOfTheReceive) {
  StartTwo({{0, 1}});
  FakeGpu& gpu = FakeGpu::Get();
  const c10::Stream reader = gpu.Fresh(1);
  const Work read = gpu.Launch(reader);
  Before seen;
  MethodOptions options;
  options.allocate = [&](const base::MemberId&, absl::string_view,
                         absl::Span<const TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
    EXPECT_EQ(metas[0].device, c10::Device("cuda:1"));
    EXPECT_NE(gpu.Current(1).id(), 0);
    c10::Event event(c10::kCUDA);
    event.record(reader);
    event.block(gpu.Current(1));
    return std::vector<at::Tensor>{OnGpu(1, 0)};
  };
  ASSERT_TRUE(b_->Register(
                    {"put"},
                    [&](ServerCall call) {
                      seen = gpu.Here(1);
                      std::move(call.responder).Reply(Payload());
                    },
                    options)
                  .ok());
  ASSERT_TRUE(a_->Call("b", {"put"}, Of({OnGpu(0, 1)})).Wait(kHang).ok());
  EXPECT_THAT(seen, Contains(read));
}

TEST_F(DeviceRpcTest, ADeferredReplyFromAnotherThreadIsOrdered) {
  StartTwo({{0, 1}});
  FakeGpu& gpu = FakeGpu::Get();
  std::atomic<Work> handled{0};
  std::thread other;
  Serve(*b_, "later", [&](ServerCall call) {
    handled = gpu.LaunchHere(1);
    other = std::thread([call = std::move(call)]() mutable {
      std::move(call.responder).Reply(Of({call.request.tensors[0]}));
    });
  });
  auto reply = a_->Call("b", {"later"}, Of({OnGpu(0, 1)})).Wait(kHang);
  other.join();
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(gpu.Here(0), Contains(handled.load()));
}

// Ourselves.

TEST_F(DeviceRpcTest, CallsToOurselves) {
  FakeGpu& gpu = FakeGpu::Get();
  Agent& mapped = Start("a", {{"a", {{0, 1}}}});
  Agent& plain = Start("b", {});
  for (Agent* agent : {&mapped, &plain}) {
    const int landing = agent == &mapped ? 1 : 0;
    std::atomic<bool> good{false};
    std::atomic<Work> handled{0};
    const Work made = gpu.LaunchHere(0);
    Serve(*agent, "self", [&](ServerCall call) {
      good = Index(call.request.tensors[0]) == landing && Is(call.request.tensors[0], 1) &&
             gpu.Here(landing).contains(made) && Index(call.request.tensors[1]) == kCpuIndex;
      handled = gpu.LaunchHere(landing);
      std::move(call.responder).Reply(Of(call.request.tensors));
    });
    at::Tensor tensor = OnGpu(0, 1);
    CallOptions options;
    options.reply_into = {OnGpu(0, 0), at::full({kCount}, 0.0f)};
    auto reply = agent->Call(agent->self().name, {"self"}, Of({tensor, at::full({kCount}, 2.0f)}), options)
                     .Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(good);
    EXPECT_EQ(Index(reply->tensors[0]), 0);
    EXPECT_NE(reply->tensors[0].data_ptr(), tensor.data_ptr());
    EXPECT_TRUE(Is(options.reply_into[0], 1));
    EXPECT_TRUE(Is(options.reply_into[1], 2));
    EXPECT_THAT(gpu.Here(0), Contains(handled.load()));
  }
  auto refused = mapped.Call("a", {"self"}, Of({OnGpu(2, 1)})).Wait(kHang);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
}

}  // namespace
}  // namespace Atoll::rpc
