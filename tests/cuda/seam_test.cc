// The seam between transport and CUDA, as far as it can be seen on a machine without a GPU: nothing of CUDA
// is loaded, messages on the CPU travel, a buffer on a GPU is refused with the reason; and the library
// itself, loaded by hand.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>

#include "atoll/tests/transport/testing.h"
#include "atoll/transport/cuda_plugin.h"

namespace Atoll::transport::testing {
namespace {

using ::testing::HasSubstr;

bool HasDriver() { return dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr; }

std::string LoadedFiles() {
  std::ifstream maps("/proc/self/maps");
  std::stringstream text;
  text << maps.rdbuf();
  return text.str();
}

class SeamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (HasDriver()) GTEST_SKIP() << "this machine has a CUDA driver: cuda_test tells what holds then";
    auto pipe = client_.Connect(server_);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    near_ = *pipe;
    far_ = server_.Accepted();
    ASSERT_NE(far_, nullptr);
  }
  /// The pipe still carries messages.
  void ExpectUsable() {
    std::vector<std::string> tensors{Pattern(1 << 17, 3)};
    auto written = StartWrite(*near_, MessageOf("after", tensors));
    auto received = Receive(*far_);
    ASSERT_TRUE(received.ok()) << received.status();
    ASSERT_TRUE(written.Wait(kLimit).ok());
    EXPECT_EQ(received->header, "after");
    EXPECT_TRUE(received->tensors == tensors);
  }

  Member server_{Options("server")}, client_{Options("client")};
  std::shared_ptr<Pipe> near_, far_;
};

TEST_F(SeamTest, WithoutADriverNothingOfCudaIsLoaded) {
  std::string why;
  EXPECT_EQ(LoadCudaPlugin(&why), nullptr);
  EXPECT_THAT(why, HasSubstr("no CUDA driver"));
  const std::string files = LoadedFiles();
  EXPECT_THAT(files, HasSubstr("libtorch_cpu.so"));
  EXPECT_THAT(files, ::testing::Not(HasSubstr("libatoll_cuda")));
  EXPECT_THAT(files, ::testing::Not(HasSubstr("libtorch_cuda")));
  EXPECT_THAT(files, ::testing::Not(HasSubstr("libc10_cuda")));
  ExpectUsable();
}

TEST_F(SeamTest, ACudaBufferIsRefusedWithTheReason) {
  char byte = 0;
  Message message;
  message.tensors.push_back({&byte, 1, {Device::Kind::kCuda, 0}, nullptr});
  absl::Status status = Write(*near_, std::move(message));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a CUDA buffer, but this machine has no CUDA driver"));
  ExpectUsable();
}

TEST_F(SeamTest, ATargetThatThePeerDoesNotHaveIsRefusedByName) {
  char byte = 0;
  Message message;
  message.tensors.push_back({&byte, 1, {}, nullptr});
  message.targets.push_back({Device::Kind::kCuda, 3});
  absl::Status status = Write(*near_, std::move(message));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no channel leads from our cpu to cuda:3 of server"));
  ExpectUsable();
}

TEST(EnableCudaTest, AnEndpointThatDoesWithoutSaysSo) {
  EndpointOptions options = Options("server");
  options.enable_cuda = false;
  Member server(options), client(Options("client"));
  auto near = client.Connect(server);
  ASSERT_TRUE(near.ok()) << near.status();
  auto far = server.Accepted();
  ASSERT_NE(far, nullptr);
  char byte = 0;
  Message message;
  message.tensors.push_back({&byte, 1, {Device::Kind::kCuda, 0}, nullptr});
  absl::Status status = Write(*far, std::move(message));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("enable_cuda"));
}

#ifdef ATOLL_CUDA_LIBRARY

// In a child: it loads the CUDA half of LibTorch, which the tests above must not find in theirs.
int UseTheLibrary() {
  auto expect = [](bool good, const char* what) {
    if (!good) std::fprintf(stderr, "not so: %s\n", what);
    return good;
  };
  void* library = dlopen(ATOLL_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  auto* create = reinterpret_cast<CudaPlugin* (*)(int)>(dlsym(library, kCudaPluginEntry));
  bool good = expect(create != nullptr, "it has its entry");
  if (!good) return 3;
  good &= expect(create(kCudaPluginAbi + 1) == nullptr, "another ABI is refused");
  CudaPlugin* plugin = create(kCudaPluginAbi);
  good &= expect(plugin != nullptr, "its own ABI is taken");
  if (!good) return 4;
  std::multiset<std::string> names;
  for (auto& [name, channel] : plugin->MakeChannels(tensorpipe::channel::basic::create())) {
    names.insert(name);
    good &= expect(channel != nullptr, "a channel is there");
    if (!HasDriver()) good &= expect(!channel->isViable(), "no channel is viable without a driver");
  }
  good &= expect(names == std::multiset<std::string>({"cuda_basic", "cuda_gdr", "cuda_ipc", "cuda_xth"}),
                 "its channels");
  char byte = 0;
  auto wrapped = plugin->Wrap({&byte, 1, {Device::Kind::kCuda, 0}, nullptr});
  good &= expect(absl::IsInvalidArgument(wrapped.status()), "memory of the CPU is no buffer on a GPU");
  std::fprintf(stderr, "%s\n", std::string(wrapped.status().message()).c_str());
  return good ? 0 : 1;
}

TEST(CudaLibraryDeathTest, LoadsAndRefusesWithoutAGpu) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(std::_Exit(UseTheLibrary()), ::testing::ExitedWithCode(0), "a buffer on cuda:0");
}

#endif

}  // namespace
}  // namespace Atoll::transport::testing
