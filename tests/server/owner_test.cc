#include "atoll/server/owner.h"

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/synchronization/notification.h"
#include "atoll/base/future.h"
#include "atoll/rref/node.h"

namespace Atoll::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr absl::Duration kHang = absl::Seconds(60);

/// A job of one owner, which runs in a thread of its own, and workers that are bare nodes.
class OwnerTest : public ::testing::Test {
 protected:
  ~OwnerTest() override {
    workers_.clear();
    if (run_.joinable()) run_.join();
  }

  void Start(int workers, std::function<void(absl::string_view)> say) {
    base::Promise<int> port;
    base::Promise<Owner*> started;
    OwnerOptions options;
    options.say = std::move(say);
    options.node.before_join = [port](rref::ObjectSpace&, rpc::Agent& agent) {
      port.Set(agent.endpoint()->port());
      return absl::OkStatus();
    };
    run_ = std::thread([this, workers, options = std::move(options), started] {
      absl::StatusOr<std::unique_ptr<Owner>> owner = Owner::Start(LaunchOf(0, workers, 0), options);
      started.Set(owner.ok() ? absl::StatusOr<Owner*>(owner->get()) : owner.status());
      status_ = owner.ok() ? (*owner)->Run() : owner.status();
    });
    const int coordinator = port.future().Wait(kHang).value_or(0);
    workers_.resize(workers);
    std::vector<std::thread> joins;
    for (int i = 0; i < workers; ++i) {
      joins.emplace_back([&, i] {
        auto node = rref::Node::Start(LaunchOf(1 + i, workers, coordinator));
        EXPECT_TRUE(node.ok()) << node.status();
        if (node.ok()) workers_[i] = *std::move(node);
      });
    }
    for (std::thread& join : joins) join.join();
    owner_ = started.future().Wait(kHang).value_or(nullptr);
    ASSERT_NE(owner_, nullptr);
  }
  absl::Status End() {
    run_.join();
    return status_;
  }

  static cluster::Launch LaunchOf(int rank, int workers, int port) {
    cluster::Launch launch;
    launch.job = "owner-test";
    launch.rank = rank;
    launch.world_size = 1 + workers;
    launch.owners = 1;
    launch.role = rank == 0 ? cluster::Role::kOwner : cluster::Role::kWorker;
    launch.name = rank == 0 ? "owner0" : "worker" + std::to_string(rank - 1);
    launch.coordinator_port = port;
    launch.key = "a key of at least sixteen bytes";
    launch.join_limit = kHang;
    return launch;
  }

  Owner* owner_ = nullptr;
  std::vector<std::unique_ptr<rref::Node>> workers_;

 private:
  absl::Status status_;
  std::thread run_;
};

TEST_F(OwnerTest, SaysOfEveryoneThatItCameAndLeft) {
  std::vector<std::string> lines;
  Start(2, [&lines](absl::string_view line) { lines.emplace_back(line); });
  for (auto& worker : workers_) EXPECT_TRUE(worker->Stop(kHang).ok());
  EXPECT_TRUE(End().ok());
  EXPECT_THAT(lines,
              UnorderedElementsAre("worker0 joined", "worker1 joined", "worker0 left", "worker1 left"));
}

TEST_F(OwnerTest, AJobWhoseWorkersAllFailedHasFailed) {
  std::vector<std::string> lines;
  Start(2, [&lines](absl::string_view line) { lines.emplace_back(line); });
  workers_[0]->Stop(kHang, absl::InternalError("the data is gone")).IgnoreError();
  workers_[1].reset();  // As a program does that returns early.
  const absl::Status status = End();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("worker0 died"), HasSubstr("the data is gone"), HasSubstr("worker1 died"),
                    HasSubstr("ended without leaving in order")));
}

TEST_F(OwnerTest, AJobGoesOnWithTheRestOfOneThatFailed) {
  Start(2, [](absl::string_view) {});
  workers_[0]->Stop(kHang, absl::InternalError("the data is gone")).IgnoreError();
  EXPECT_TRUE(workers_[1]->Stop(kHang).ok());
  EXPECT_TRUE(End().ok());
}

TEST_F(OwnerTest, SayMayWaitAndMayStop) {
  absl::Notification inside, go_on;
  Start(1, [&](absl::string_view) {
    if (!inside.HasBeenNotified()) inside.Notify();
    go_on.WaitForNotification();
    owner_->Stop();
  });
  inside.WaitForNotification();
  owner_->Stop();  // Does not wait for whoever reads what it says.
  EXPECT_TRUE(workers_[0]->Stop(kHang).ok());
  go_on.Notify();
  EXPECT_TRUE(End().ok());
}

}  // namespace
}  // namespace Atoll::server
