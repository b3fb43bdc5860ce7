// A job of one owner and one worker in one process, against the installed package: what a user links.
// Usage: out_of_tree PORT
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "atoll/client/session.h"
#include "atoll/client/trainer.h"
#include "atoll/server/owner.h"

namespace {

Atoll::cluster::Launch LaunchOf(int rank, int port) {
  Atoll::cluster::Launch launch;
  launch.job = "out-of-tree";
  launch.rank = rank;
  launch.world_size = 2;
  launch.owners = 1;
  launch.coordinator_port = port;
  launch.key = std::string(32, 'k');
  if (absl::Status status = Atoll::cluster::Finish(launch); !status.ok()) {
    std::printf("launch: %s\n", status.ToString().c_str());
    std::exit(1);
  }
  return launch;
}

absl::Status Train(int port) {
  auto session = Atoll::client::Session::Join(LaunchOf(1, port));
  if (!session.ok()) return session.status();
  at::Tensor w = at::ones({1000});
  w.set_requires_grad(true);
  Atoll::client::TrainerOptions options;
  options.optimizer.lr = 0.5;
  auto trainer = Atoll::client::Trainer::Attach(**session, {{{"w", w}}}, options);
  if (!trainer.ok()) return trainer.status();
  for (int step = 1; step <= 2; ++step) {
    w.mul(w).sum().backward();
    auto result = (*trainer)->Step();
    if (!result.ok()) return result.status();
    if (result->step != step || result->contributors != 1) return absl::InternalError("not the step it was");
  }
  // Adam's first two steps by hand: 1 - 0.5, and 0.5 minus nearly as much (m / sqrt(v) with gradients 2, 1).
  float value = w.detach().sum().item<float>() / 1000;
  if (value < 0.01f || value > 0.06f) return absl::InternalError("w is " + std::to_string(value));
  trainer->reset();
  return (*session)->Leave();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  int port = std::atoi(argv[1]);
  absl::Status served;
  std::thread owner([&] {
    auto owner = Atoll::server::Owner::Start(LaunchOf(0, port), {});
    served = owner.ok() ? (*owner)->Run() : owner.status();
  });
  absl::Status trained = Train(port);
  owner.join();
  std::printf("out of tree: %s\n", trained.ok() && served.ok() ? "ok" : "failed");
  std::printf("worker: %s\nowner: %s\n", trained.ToString().c_str(), served.ToString().c_str());
  return trained.ok() && served.ok() ? 0 : 1;
}
