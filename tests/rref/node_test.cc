#include "atoll/rref/node.h"

#include <memory>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"

namespace Atoll::rref {
namespace {

using testing::HasSubstr;

cluster::Launch LaunchOf(int rank, int world, int port) {
  cluster::Launch launch;
  launch.job = "node-test";
  launch.rank = rank;
  launch.world_size = world;
  launch.owners = 1;
  launch.role = rank == 0 ? cluster::Role::kOwner : cluster::Role::kWorker;
  launch.name = rank == 0 ? "owner0" : "worker" + std::to_string(rank - 1);
  launch.coordinator_port = port;
  launch.key = "a key of at least sixteen bytes";
  launch.join_limit = kHang;
  return launch;
}

// A job of `world` nodes in this process; rank 0 coordinates at a port that the system chooses.
class Job {
 public:
  explicit Job(int world, Record* record) : nodes(world) {
    base::Promise<int> port;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank] {
        NodeOptions options;
        if (rank == 0) {
          options.before_join = [&](ObjectSpace& objects, rpc::Agent& agent) {
            absl::Status status = objects.RegisterClass("Test", TestFactory(record));
            port.Set(agent.endpoint()->port());
            return status;
          };
        }
        const int known = rank == 0 ? 0 : *port.future().Wait(kHang);
        auto node = Node::Start(LaunchOf(rank, world, known), options);
        EXPECT_TRUE(node.ok()) << rank << ": " << node.status();
        if (node.ok()) nodes[rank] = *std::move(node);
      });
    }
    for (std::thread& thread : threads) thread.join();
    coordinator_port = port.future().Wait(kHang).value_or(0);
  }
  // All at once, as processes do: the coordinator waits for the others.
  void Stop() {
    std::vector<std::thread> threads;
    for (auto& node : nodes) {
      threads.emplace_back([&node] {
        if (node == nullptr) return;
        absl::Status status = node->Stop(kHang);
        EXPECT_TRUE(status.ok()) << node->launch().name << ": " << status;
        EXPECT_EQ(node->Stop(kHang), status);
      });
    }
    for (std::thread& thread : threads) thread.join();
    nodes.clear();
  }
  std::vector<std::unique_ptr<Node>> nodes;
  int coordinator_port = 0;
};

TEST(Node, StartsServesAndStopsInOrder) {
  Record record;
  Job job(3, &record);
  ASSERT_EQ(job.nodes[2]->membership().Members().size(), 3u);
  auto rref = job.nodes[2]->objects().Create("owner0", "Test", Body("x"), "pin").Wait(kHang);
  ASSERT_TRUE(rref.ok()) << rref.status();
  auto other = job.nodes[1]->objects().Find("owner0", "pin").Wait(kHang);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ((*(*other)->Call({"get"}, Body("")).Wait(kHang)).body, "x");
  // One leaves in order: the owner's objects hear of it.
  EXPECT_TRUE(job.nodes[2]->Stop(kHang).ok());
  EXPECT_TRUE(record.AwaitGone(std::vector<std::string>{"worker1"}));
  job.Stop();
  EXPECT_EQ(record.alive(), 0);
  EXPECT_EQ((*other)->Call({"get"}, Body("")).Wait(kHang).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Node, ADeadMembersReferencesAreReleased) {
  Record record;
  Job job(3, &record);
  auto rref = job.nodes[2]->objects().Create("owner0", "Test", Body("x")).Wait(kHang);
  ASSERT_TRUE(rref.ok()) << rref.status();
  job.nodes[2]->agent().endpoint()->Close();  // As a killed process looks from outside.
  EXPECT_TRUE(record.AwaitAlive(0));
  job.nodes[2]->Stop(absl::Milliseconds(100)).IgnoreError();
  job.nodes[2].reset();
  job.Stop();
}

TEST(Node, AnErrorBeforeJoiningEndsTheStart) {
  NodeOptions options;
  options.before_join = [](ObjectSpace&, rpc::Agent&) { return absl::AbortedError("not today"); };
  EXPECT_EQ(Node::Start(LaunchOf(0, 1, 0), options).status().code(), absl::StatusCode::kAborted);
}

// Scenario init 16.
TEST(Node, APortInUseIsNamed) {
  Record record;
  Job job(1, &record);
  auto second = Node::Start(LaunchOf(0, 1, job.coordinator_port));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(std::to_string(job.coordinator_port)));
  job.Stop();
}

TEST(Node, AnOpenWorldIsJoinedAtAnyTime) {
  Record record;
  base::Promise<int> port;
  NodeOptions options;
  options.before_join = [&](ObjectSpace& objects, rpc::Agent& agent) {
    port.Set(agent.endpoint()->port());
    return objects.RegisterClass("Test", TestFactory(&record));
  };
  auto first = Node::Start(LaunchOf(0, cluster::kOpenWorld, 0), options);
  ASSERT_TRUE(first.ok()) << first.status();
  for (const char* name : {"guest", "another"}) {
    cluster::Launch launch =
        LaunchOf(cluster::kAnyRank.value(), cluster::kOpenWorld, *port.future().Wait(kHang));
    launch.name = name;
    auto guest = Node::Start(launch);
    ASSERT_TRUE(guest.ok()) << guest.status();
    EXPECT_EQ((*guest)->membership().self().rank, base::Rank(1)) << "free again each time";
    auto made = (*guest)->objects().Create("owner0", "Test", Body("x")).Wait(kHang);
    EXPECT_TRUE(made.ok()) << made.status();
    made = std::shared_ptr<RRef>();
    EXPECT_EQ((*guest)->Stop(kHang), absl::OkStatus());
  }
  EXPECT_EQ((*first)->Stop(kHang), absl::OkStatus());
}

TEST(Node, ContradictingLaunchesAreRefused) {
  EXPECT_EQ(Node::Start(LaunchOf(3, 3, 0)).status().code(), absl::StatusCode::kInvalidArgument);
  auto launch = LaunchOf(0, 1, 0);
  launch.name.clear();
  EXPECT_EQ(Node::Start(launch).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace Atoll::rref
