// A whole job in this process: owners as nodes, workers as sessions, over the real transport.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "atoll/client/session.h"
#include "atoll/rref/node.h"
#include "atoll/shard_optim/shard_object.h"

namespace Atoll::client {

inline constexpr absl::Duration kHang = absl::Seconds(60);

/// Runs `body` with 0 .. count - 1 at the same time.
inline void InParallel(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

struct TrainingJobOptions {
  transport::EndpointOptions endpoint;
  /// What an owner serves.
  std::function<absl::Status(rref::ObjectSpace&, rpc::Agent&)> serve = [](rref::ObjectSpace& objects,
                                                                          rpc::Agent& agent) {
    return shard_optim::RegisterShardClass(objects, agent);
  };
};

class TrainingJob {
 public:
  TrainingJob(int owners, int workers, const TrainingJobOptions& job = {})
      : owner_count_(owners), workers_(workers), owners_(owners) {
    // Rank 0's port is the system's choice: the others hear of it before they start.
    base::Promise<int> port;
    InParallel(owners + workers, [&](int rank) {
      rref::NodeOptions options;
      options.endpoint = job.endpoint;
      options.before_join = [&, rank](rref::ObjectSpace& objects, rpc::Agent& agent) {
        if (rank == 0) port.Set(agent.endpoint()->port());
        return rank < owner_count_ ? job.serve(objects, agent) : absl::OkStatus();
      };
      const cluster::Launch launch = LaunchOf(rank, rank == 0 ? 0 : port.future().Wait(kHang).value_or(0));
      if (rank < owners) {
        auto node = rref::Node::Start(launch, options);
        EXPECT_TRUE(node.ok()) << launch.name << ": " << node.status();
        if (node.ok()) owners_[rank] = *std::move(node);
      } else {
        auto session = Session::Join(launch, options);
        EXPECT_TRUE(session.ok()) << launch.name << ": " << session.status();
        if (session.ok()) workers_[rank - owners] = *std::move(session);
      }
    });
    port_ = port.future().Wait(kHang).value_or(0);
  }
  ~TrainingJob() {
    // All at once, as processes do: the coordinator waits for the others.
    const int workers = static_cast<int>(workers_.size());
    InParallel(owner_count_ + workers, [&](int rank) {
      if (rank >= owner_count_) {
        auto& session = workers_[rank - owner_count_];
        if (session != nullptr) session->Leave(kHang).IgnoreError();
      } else if (owners_[rank] != nullptr) {
        owners_[rank]->Stop(kHang).IgnoreError();
      }
    });
  }

  cluster::Launch LaunchOf(int rank, int port) const {
    cluster::Launch launch;
    launch.job = "training-test";
    launch.rank = rank;
    launch.world_size = owner_count_ + static_cast<int>(workers_.size());
    launch.owners = owner_count_;
    launch.role = rank < owner_count_ ? cluster::Role::kOwner : cluster::Role::kWorker;
    launch.name =
        rank < owner_count_ ? "owner" + std::to_string(rank) : "worker" + std::to_string(rank - owner_count_);
    launch.coordinator_port = port;
    launch.key = "a key of at least sixteen bytes";
    launch.join_limit = kHang;
    return launch;
  }

  Session& worker(int index) { return *workers_[index]; }
  rref::Node& owner(int index) { return *owners_[index]; }

  /// As a killed process looks from outside: its connections end, and nobody answers any more.
  void CutOffWorker(int index) { workers_[index]->node().agent().endpoint()->Close(); }
  void CutOffOwner(int index) { owners_[index]->agent().endpoint()->Close(); }
  /// What is left of a worker that was cut off.
  void BuryWorker(int index) {
    workers_[index]->Leave(absl::Milliseconds(10)).IgnoreError();
    workers_[index].reset();
  }
  void BuryOwner(int index) {
    owners_[index]->Stop(absl::Milliseconds(10)).IgnoreError();
    owners_[index].reset();
  }
  /// A new process takes a worker's name and rank.
  absl::Status RestartWorker(int index) {
    auto session = Session::Join(LaunchOf(owner_count_ + index, port_));
    if (session.ok()) workers_[index] = *std::move(session);
    return session.status();
  }

 private:
  const int owner_count_;
  int port_ = 0;
  std::vector<std::unique_ptr<Session>> workers_;
  std::vector<std::unique_ptr<rref::Node>> owners_;
};

}  // namespace Atoll::client
