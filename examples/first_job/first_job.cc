// A first job of one's own: every worker fits the same line to its own noisy points; the optimizer's state is
// on the owners. One owner and two workers on this machine, from the root of the tree:
//
//   (export WORLD_SIZE=3 ATOLL_OWNERS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
//    build/release/bin/atoll-server & RANK=1 build/release/bin/first_job & RANK=2 build/release/bin/first_job; wait)
#include <cstdio>

#include <torch/torch.h>

#include "atoll/client/session.h"
#include "atoll/client/trainer.h"

namespace {

using Atoll::client::Session;
using Atoll::client::Trainer;
using Atoll::shard_optim::AdamOptions;
using Atoll::shard_optim::Sync;

absl::Status Run() {
  // Who we are comes from the launcher; returns when the whole job is there.
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join(Atoll::cluster::LaunchFromEnvironment());
  if (!session.ok()) return session.status();
  const int worker = (*session)->worker_index();

  torch::nn::Linear model(3, 1);
  // From here on the owners hold the optimizer; all workers start from worker 0's values.
  absl::StatusOr<std::unique_ptr<Trainer>> trainer = Trainer::Attach(
      **session, model->named_parameters(), {.optimizer = AdamOptions{.lr = 0.05}, .policy = Sync{}});
  if (!trainer.ok()) return trainer.status();

  torch::manual_seed(worker);  // Other data on each worker.
  const torch::Tensor slope = torch::tensor({{1.0f, -2.0f, 3.0f}});
  for (int step = 1; step <= 200; ++step) {
    const torch::Tensor x = torch::randn({32, 3});
    const torch::Tensor y = torch::matmul(x, slope.t()) + 0.5 + 0.01 * torch::randn({32, 1});
    const torch::Tensor loss = torch::mse_loss(model(x), y);
    loss.backward();  // Gradients leave for the owners while this runs.
    // The mean over all workers is applied, and the new values are here.
    ATOLL_RETURN_IF_ERROR((*trainer)->Step().status());
    if (worker == 0 && step % 50 == 0) std::printf("step %d loss %.5f\n", step, loss.item<double>());
  }
  ATOLL_RETURN_IF_ERROR((*trainer)->Leave());
  std::printf("worker %d: checksum %08x\n", worker, Atoll::client::Checksum(model->named_parameters()));
  return (*session)->Leave();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "first_job: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
