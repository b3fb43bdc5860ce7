// The owner's pass beside torch's, one thread: sums the gradients of so many workers and applies Adam.
//   adam_side call ours|torch GRADIENTS NAME -
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "absl/strings/numbers.h"
#include "atoll/bench/side.h"
#include "atoll/shard_optim/adam.h"

namespace Atoll::bench {
namespace {

constexpr int64_t kParameters = 16 << 20;

struct State {
  std::vector<at::Tensor> gradients;
  at::Tensor param = at::randn({kParameters});
  at::Tensor exp_avg = at::zeros({kParameters}), exp_avg_sq = at::zeros({kParameters});
  at::Tensor sum = at::zeros({kParameters});
};

// A chunk after the other, as an owner does it.
void Ours(State& state) {
  constexpr int64_t kChunk = kChunkBytes / sizeof(float);
  std::vector<const float*> gradients(state.gradients.size());
  for (int64_t begin = 0; begin < kParameters; begin += kChunk) {
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = state.gradients[i].data_ptr<float>() + begin;
    shard_optim::AdamSlice slice;
    slice.param_in = slice.param_out = state.param.data_ptr<float>() + begin;
    slice.exp_avg = state.exp_avg.data_ptr<float>() + begin;
    slice.exp_avg_sq = state.exp_avg_sq.data_ptr<float>() + begin;
    slice.gradients = gradients;
    slice.divisor = static_cast<int>(gradients.size());
    slice.size = std::min(kChunk, kParameters - begin);
    shard_optim::AdamPass({}, 3, slice);
  }
}

void Torchs(State& state) {
  at::Tensor gradient = state.gradients[0];
  if (state.gradients.size() > 1) {
    at::add_out(state.sum, state.gradients[0], state.gradients[1]);
    for (size_t i = 2; i < state.gradients.size(); ++i) state.sum.add_(state.gradients[i]);
    state.sum.div_(static_cast<double>(state.gradients.size()));
    gradient = state.sum;
  }
  at::_fused_adam_({state.param}, {gradient}, {state.exp_avg}, {state.exp_avg_sq}, {}, {at::full({}, 3.0f)},
                   1e-3, 0.9, 0.999, 0.0, 1e-8, false, false);
}

}  // namespace
}  // namespace Atoll::bench

int main(int argc, char** argv) {
  using namespace Atoll::bench;
  Begin();
  int count = 0;
  const std::string side = argc > 2 ? argv[2] : "";
  if (argc != 6 || (side != "ours" && side != "torch") || !absl::SimpleAtoi(argv[3], &count) || count < 1) {
    Die("usage: adam_side call ours|torch GRADIENTS NAME -");
  }
  at::set_num_threads(1);
  State state;
  for (int i = 0; i < count; ++i) state.gradients.push_back(at::randn({kParameters}));
  Drive({nullptr, [&] { side == "ours" ? Ours(state) : Torchs(state); }, nullptr, nullptr});
}
