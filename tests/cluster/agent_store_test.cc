#include "atoll/cluster/agent_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace Atoll::cluster {
namespace {

using ::testing::HasSubstr;

/// What torchrun's agent serves.
c10::intrusive_ptr<c10d::TCPStore> ServeStore() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

Launch LaunchAt(int port, std::string job = "run") {
  Launch launch;
  launch.job = std::move(job);
  launch.world_size = 2;
  launch.coordinator_port = port;
  launch.agent_store = true;
  return launch;
}

TEST(AgentStore, WhatRankZeroPublishesTheOthersFind) {
  auto store = ServeStore();
  Launch launch = LaunchAt(store->getPort());
  // Whoever asks first waits.
  absl::StatusOr<std::string> early;
  std::thread asks([&] { early = FindCoordinator(launch, absl::Seconds(60)); });
  ASSERT_TRUE(PublishCoordinator(launch, "127.0.0.1", 4711).ok());
  asks.join();
  ASSERT_TRUE(early.ok()) << early.status();
  EXPECT_EQ(*early, "127.0.0.1:4711");
  EXPECT_EQ(*FindCoordinator(launch, absl::Seconds(60)), "127.0.0.1:4711");
  ASSERT_TRUE(PublishCoordinator(launch, "::1", 4712).ok());
  EXPECT_EQ(*FindCoordinator(launch, absl::Seconds(60)), "[::1]:4712");
}

TEST(AgentStore, AnotherJobRestartOrWorldDoesNotFindIt) {
  auto store = ServeStore();
  ASSERT_TRUE(PublishCoordinator(LaunchAt(store->getPort(), "run"), "127.0.0.1", 4711).ok());
  absl::Status status =
      FindCoordinator(LaunchAt(store->getPort(), "run.r1"), absl::Milliseconds(50)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("find the coordinator (rank 0) of job run.r1"));
  Launch grown = LaunchAt(store->getPort(), "run");
  grown.world_size = 3;
  EXPECT_FALSE(FindCoordinator(grown, absl::Milliseconds(50)).ok());
}

TEST(AgentStore, NoStoreIsAnErrorThatNamesIt) {
  int port = 0;
  {
    auto store = ServeStore();
    port = store->getPort();
  }
  absl::Status status = FindCoordinator(LaunchAt(port), absl::Milliseconds(100)).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("torchrun's store at 127.0.0.1:" + std::to_string(port)));
  EXPECT_FALSE(PublishCoordinator(LaunchAt(port), "127.0.0.1", 1, absl::Milliseconds(100)).ok());
}

TEST(AgentStore, AServerThatNeverAnswersHoldsNobody) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  absl::Status status = FindCoordinator(LaunchAt(ntohs(address.sin_port)), absl::Milliseconds(100)).status();
  EXPECT_FALSE(status.ok());
  close(listener);
}

TEST(AgentStore, WhatIsNoAddressIsRefused) {
  auto store = ServeStore();
  Launch launch = LaunchAt(store->getPort());
  store->set("atoll/run/2/coordinator", std::vector<uint8_t>{'j', 'u', 'n', 'k'});
  EXPECT_EQ(FindCoordinator(launch, absl::Seconds(60)).status().code(), absl::StatusCode::kDataLoss);
}

TEST(TorchElasticError, IsTheJsonThatTorchrunShows) {
  std::string path = (std::filesystem::temp_directory_path() / "atoll-error-XXXXXX").string();
  int fd = mkstemp(path.data());
  ASSERT_GE(fd, 0);
  close(fd);
  auto environment = [&](absl::string_view name) -> std::optional<std::string> {
    if (name == "TORCHELASTIC_ERROR_FILE") return path;
    return std::nullopt;
  };
  ASSERT_TRUE(WriteTorchElasticError("say \"no\"\n\\o/", environment).ok());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr(R"({"message": {"message": "say \"no\"\u000a\\o/", "extraInfo")"));
  EXPECT_THAT(text.str(), HasSubstr(R"("py_callstack": "say \"no\"\u000a\\o/", "timestamp": ")"));
  std::filesystem::remove(path);
  EXPECT_TRUE(
      WriteTorchElasticError("x", [](absl::string_view) { return std::optional<std::string>(); }).ok());
  auto nowhere = [](absl::string_view) { return std::optional<std::string>("/no/such/dir/file"); };
  EXPECT_FALSE(WriteTorchElasticError("x", nowhere).ok());
}

}  // namespace
}  // namespace Atoll::cluster
