// Pipes with buffers on a GPU: between two GPUs' memories, to and from the CPU, and the order of streams. A
// delay goes before what must be waited for, and nobody waits on the host in between.
#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "atoll/tests/cuda/gpu.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/cuda_plugin.h"

namespace Atoll::cuda_test {
namespace {

using ::testing::Each;
using ::testing::Eq;
using ::testing::HasSubstr;
using transport::Buffer;
using transport::Device;
using transport::Message;
using transport::Pipe;
using transport::testing::kLimit;
using transport::testing::Member;
using transport::testing::Options;
using transport::testing::PipePair;
using transport::testing::Read;
using transport::testing::ReadDescriptor;
using transport::testing::StartWrite;

constexpr int64_t kDelayMs = 100;
constexpr char kPeerVariable[] = "ATOLL_CUDA_TEST_PEER";

Buffer OnCpu(std::vector<uint32_t>& words) {
  return {words.data(), words.size() * sizeof(uint32_t), {}, nullptr};
}

/// One message with one tensor, received into `into`. Does not wait for any stream.
void Transfer(Pipe& from, Pipe& to, Buffer source, Buffer into) {
  Message message;
  message.header = "one";
  message.tensors.push_back(source);
  message.targets.push_back(into.device);
  auto written = StartWrite(from, std::move(message));
  auto descriptor = ReadDescriptor(to);
  ASSERT_TRUE(descriptor.ok()) << descriptor.status();
  ASSERT_EQ(descriptor->tensors.size(), 1u);
  EXPECT_EQ(descriptor->tensors[0].source, source.device);
  EXPECT_EQ(descriptor->tensors[0].target, into.device);
  absl::Status read = Read(to, {into});
  ASSERT_TRUE(read.ok()) << read;
  auto done = written.Wait(kLimit);
  ASSERT_TRUE(done.ok()) << done.status();
}

class PipeGpuTest : public ::testing::Test, protected PipePair {
 protected:
  void SetUp() override {
    ATOLL_NEEDS_GPU();
    server_ = std::make_unique<Member>(Options("server"));
    client_ = std::make_unique<Member>(Options("client"));
    Connect();
  }
};

TEST_F(PipeGpuTest, TheLibraryIsLoadedAndHasChannels) {
  std::string why;
  transport::CudaPlugin* plugin = transport::LoadCudaPlugin(&why);
  ASSERT_NE(plugin, nullptr) << why;
  std::vector<std::string> viable;
  for (auto& [name, channel] : plugin->MakeChannels(tensorpipe::channel::basic::create())) {
    if (channel->isViable()) viable.push_back(name);
    channel->close();
    channel->join();
  }
  std::fprintf(stderr, "viable: %s\n", absl::StrJoin(viable, " ").c_str());
  EXPECT_THAT(viable, ::testing::Contains("cuda_basic"));
  EXPECT_THAT(viable, ::testing::Contains("cuda_xth"));
}

TEST_F(PipeGpuTest, FromGpuToGpu) {
  Stream out, in;
  uint32_t value = 7;
  for (size_t count : {1u, 1000u, (1u << 18) + 1, 16u << 20}) {
    Words source(count, ++value), target(count);
    Transfer(*near_, *far_, source.buffer(out), target.buffer(in));
    in.Wait();
    EXPECT_THAT(target.Copy(), Each(Eq(value))) << count;
  }
}

TEST_F(PipeGpuTest, FromGpuToCpu) {
  Stream out;
  Words source(3 << 20, 11);
  std::vector<uint32_t> target(3 << 20);
  Transfer(*near_, *far_, source.buffer(out), OnCpu(target));
  EXPECT_THAT(target, Each(Eq(11u)));
}

TEST_F(PipeGpuTest, FromCpuToGpu) {
  Stream in;
  std::vector<uint32_t> source(3 << 20, 12);
  Words target(3 << 20);
  Transfer(*near_, *far_, OnCpu(source), target.buffer(in));
  in.Wait();
  EXPECT_THAT(target.Copy(), Each(Eq(12u)));
}

TEST_F(PipeGpuTest, AMessageOfAllKinds) {
  Stream out, in;
  Words from_gpu(5000, 1), to_gpu_from_gpu(5000), to_gpu_from_cpu(70000);
  Words from_gpu_to_cpu(9000, 3);
  std::vector<uint32_t> from_cpu(70000, 2), to_cpu(9000), plain(100, 4), plain_target(100);
  const Device gpu{Device::Kind::kCuda, 0};
  Message message;
  message.tensors = {from_gpu.buffer(out), OnCpu(from_cpu), from_gpu_to_cpu.buffer(out), OnCpu(plain)};
  message.targets = {gpu, gpu, Device{}, Device{}};
  auto written = StartWrite(*near_, std::move(message));
  ASSERT_TRUE(ReadDescriptor(*far_).ok());
  ASSERT_TRUE(Read(*far_, {to_gpu_from_gpu.buffer(in), to_gpu_from_cpu.buffer(in), OnCpu(to_cpu),
                           OnCpu(plain_target)})
                  .ok());
  ASSERT_TRUE(written.Wait(kLimit).ok());
  in.Wait();
  EXPECT_THAT(to_gpu_from_gpu.Copy(), Each(Eq(1u)));
  EXPECT_THAT(to_gpu_from_cpu.Copy(), Each(Eq(2u)));
  EXPECT_THAT(to_cpu, Each(Eq(3u)));
  EXPECT_THAT(plain_target, Each(Eq(4u)));
}

TEST_F(PipeGpuTest, ASendComesAfterWhatItsStreamHoldsAndAReaderAfterTheReceive) {
  Stream out, in;
  Words source(4 << 20, 1), target(4 << 20, 2);
  Witness witness;
  Delay(out.get(), kDelayMs);
  Fill(source.data(), source.count(), 3, out.get());
  Transfer(*near_, *far_, source.buffer(out), target.buffer(in));
  witness.Look(target, 3, in.get());
  EXPECT_EQ(witness.differing(), 0u);
}

TEST_F(PipeGpuTest, ALoanEndsInTheOrderOfItsStream) {
  Stream out, in;
  Words source(4 << 20, 5), target(4 << 20);
  Delay(out.get(), kDelayMs);
  Transfer(*near_, *far_, source.buffer(out), target.buffer(in));
  // It has been returned: writing it, in the order of the stream, must not reach the receiver.
  Fill(source.data(), source.count(), 6, out.get());
  out.Wait();
  in.Wait();
  EXPECT_THAT(target.Copy(), Each(Eq(5u)));
}

TEST_F(PipeGpuTest, AReceiveComesAfterTheLastReaderOfItsTarget) {
  Stream out, in;
  Words source(4 << 20, 8), target(4 << 20, 7);
  Witness before, after;
  Delay(in.get(), kDelayMs);
  before.Look(target, 7, in.get());
  Transfer(*near_, *far_, source.buffer(out), target.buffer(in));
  after.Look(target, 8, in.get());
  EXPECT_EQ(before.differing(), 0u);
  EXPECT_EQ(after.differing(), 0u);
}

TEST_F(PipeGpuTest, ToTheCpuToo) {
  Stream out;
  Words source(1 << 20, 1);
  std::vector<uint32_t> target(1 << 20);
  Delay(out.get(), kDelayMs);
  Fill(source.data(), source.count(), 9, out.get());
  Transfer(*near_, *far_, source.buffer(out), OnCpu(target));
  EXPECT_THAT(target, Each(Eq(9u)));
}

TEST_F(PipeGpuTest, BothDirectionsManyTimes) {
  Stream out, in;
  Words ping(100000), pong(100000);
  Witness witness;
  for (uint32_t i = 1; i <= 50; ++i) {
    Fill(ping.data(), ping.count(), i, out.get());
    Transfer(*near_, *far_, ping.buffer(out), pong.buffer(in));
    Transfer(*far_, *near_, pong.buffer(in), ping.buffer(out));
    witness.Look(ping, i, out.get());
  }
  EXPECT_EQ(witness.differing(), 0u);
}

TEST_F(PipeGpuTest, WhatIsNotThereIsRefusedAndThePipeGoesOn) {
  Stream out, in;
  Words source(100, 1), target(100);
  std::vector<uint32_t> cpu(100);
  auto refused = [&](Buffer buffer, Device to) {
    Message message;
    message.tensors.push_back(buffer);
    message.targets.push_back(to);
    return StartWrite(*near_, std::move(message)).Wait(kLimit).status();
  };
  Buffer no_such = source.buffer(out);
  no_such.device.index = 99;
  absl::Status status = refused(no_such, {});
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:99"));
  Buffer not_gpu = OnCpu(cpu);
  not_gpu.device = source.device();
  status = refused(not_gpu, {});
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no GPU's"));
  status = refused(source.buffer(out), {Device::Kind::kCuda, 99});
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("no channel leads from our cuda:0 to cuda:99 of server"));
  Transfer(*near_, *far_, source.buffer(out), target.buffer(in));
  in.Wait();
  EXPECT_THAT(target.Copy(), Each(Eq(1u)));
}

TEST_F(PipeGpuTest, BetweenTwoGpus) {
  if (GpuCount() < 2) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: needs two GPUs";
  Stream out(0), in(1);
  Words source(1 << 20, 1, 0), target(1 << 20, 0, 1);
  Witness witness(1);
  Check(cudaSetDevice(0), "cudaSetDevice");
  Delay(out.get(), kDelayMs);
  Fill(source.data(), source.count(), 21, out.get());
  Transfer(*near_, *far_, source.buffer(out), target.buffer(in));
  Check(cudaSetDevice(1), "cudaSetDevice");
  witness.Look(target, 21, in.get());
  EXPECT_EQ(witness.differing(), 0u);
}

// The other end of TwoProcesses: sends back what it gets, from GPU memory, in the order of one stream.
TEST(EchoChild, Serves) {
  const char* peer = std::getenv(kPeerVariable);
  if (peer == nullptr) GTEST_SKIP() << "it is started by PipeGpuTest.TwoProcesses";
  Member self(Options("child"));
  auto pipe = self.Connect(std::vector<std::string>{peer});
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  Stream stream;
  while (true) {
    auto descriptor = ReadDescriptor(**pipe);
    ASSERT_TRUE(descriptor.ok()) << descriptor.status();
    if (descriptor->tensors.empty()) break;
    ASSERT_EQ(descriptor->tensors[0].target, (Device{Device::Kind::kCuda, 0}));
    Words words(descriptor->tensors[0].bytes / sizeof(uint32_t));
    ASSERT_TRUE(Read(**pipe, {words.buffer(stream)}).ok());
    Message back;
    back.tensors.push_back(words.buffer(stream));
    back.targets.push_back({Device::Kind::kCuda, 0});
    ASSERT_TRUE(StartWrite(**pipe, std::move(back)).Wait(kLimit).ok());
    stream.Wait();  // Before the memory goes.
  }
  ASSERT_TRUE(StartWrite(**pipe, Message{"bye", {}, {}}).Wait(kLimit).ok());
  ReadDescriptor(**pipe).IgnoreError();  // Until the other side has read it and closes.
}

TEST_F(PipeGpuTest, TwoProcesses) {
  const std::string address = absl::StrCat(kPeerVariable, "=", server_->endpoint().addresses()[0]);
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  environment.push_back(const_cast<char*>(address.c_str()));
  environment.push_back(nullptr);
  char program[] = "/proc/self/exe", filter[] = "--gtest_filter=EchoChild.Serves";
  char* arguments[] = {program, filter, nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, program, nullptr, nullptr, arguments, environment.data()), 0);
  auto pipe = server_->Accepted();
  ASSERT_NE(pipe, nullptr);
  Stream stream;
  Witness witness;
  for (uint32_t value = 1; value <= 10; ++value) {
    Words source(2 << 20), target(2 << 20);
    Delay(stream.get(), 20);
    Fill(source.data(), source.count(), value, stream.get());
    Message message;
    message.tensors.push_back(source.buffer(stream));
    message.targets.push_back(source.device());
    auto written = StartWrite(*pipe, std::move(message));
    auto descriptor = ReadDescriptor(*pipe);
    ASSERT_TRUE(descriptor.ok()) << descriptor.status();
    ASSERT_TRUE(Read(*pipe, {target.buffer(stream)}).ok());
    ASSERT_TRUE(written.Wait(kLimit).ok());
    witness.Look(target, value, stream.get());
    stream.Wait();
  }
  EXPECT_EQ(witness.differing(), 0u);
  ASSERT_TRUE(StartWrite(*pipe, Message{"end", {}, {}}).Wait(kLimit).ok());
  EXPECT_TRUE(ReadDescriptor(*pipe).ok());
  pipe->Close(absl::CancelledError("done"));
  int result = -1;
  ASSERT_EQ(waitpid(child, &result, 0), child);
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace Atoll::cuda_test
