// The owner's pass beside torch's: ns a parameter for 1, 2 and 4 gradients, one thread.
//
//   adam_bench [MILLIONS OF PARAMETERS]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "atoll/shard_optim/adam.h"

namespace {

using Clock = std::chrono::steady_clock;

// Best of several, in ns an element.
double Best(int64_t elements, const std::function<void()>& run) {
  double best = 1e30;
  for (int i = 0; i < 7; ++i) {
    Clock::time_point start = Clock::now();
    run();
    best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - start).count() / elements);
  }
  return best;
}

// A chunk after the other, as an owner does it: 4 MiB each.
void Ours(int64_t n, const std::vector<at::Tensor>& gradients, at::Tensor& p, at::Tensor& m, at::Tensor& v) {
  constexpr int64_t kChunk = 1 << 20;
  std::vector<const float*> at(gradients.size());
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    for (size_t i = 0; i < gradients.size(); ++i) at[i] = gradients[i].data_ptr<float>() + begin;
    Atoll::shard_optim::AdamSlice slice;
    slice.param_in = slice.param_out = p.data_ptr<float>() + begin;
    slice.exp_avg = m.data_ptr<float>() + begin;
    slice.exp_avg_sq = v.data_ptr<float>() + begin;
    slice.gradients = at;
    slice.divisor = static_cast<int>(gradients.size());
    slice.size = std::min(kChunk, n - begin);
    Atoll::shard_optim::AdamPass({}, 3, slice);
  }
}

void Torchs(std::vector<at::Tensor>& gradients, at::Tensor& sum, at::Tensor& p, at::Tensor& m,
            at::Tensor& v) {
  at::Tensor step = at::full({}, 3.0f);
  at::Tensor gradient = gradients[0];
  if (gradients.size() > 1) {
    at::add_out(sum, gradients[0], gradients[1]);
    for (size_t i = 2; i < gradients.size(); ++i) sum.add_(gradients[i]);
    sum.div_(static_cast<double>(gradients.size()));
    gradient = sum;
  }
  at::_fused_adam_({p}, {gradient}, {m}, {v}, {}, {step}, 1e-3, 0.9, 0.999, 0.0, 1e-8, false, false);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int64_t n = (argc > 1 ? std::atoll(argv[1]) : 32) << 20;
  at::Tensor p = at::randn({n}), m = at::zeros({n}), v = at::zeros({n}), sum = at::zeros({n});
  std::printf("%lld M parameters, 1 thread, ns a parameter (best of 7)\n", static_cast<long long>(n >> 20));
  std::printf("%-10s %10s %22s\n", "gradients", "atoll", "torch's sums + fused");
  for (int count : {1, 2, 4}) {
    std::vector<at::Tensor> gradients;
    for (int i = 0; i < count; ++i) gradients.push_back(at::randn({n}));
    double ours = Best(n, [&] { Ours(n, gradients, p, m, v); });
    double torchs = Best(n, [&] { Torchs(gradients, sum, p, m, v); });
    std::printf("%-10d %10.2f %22.2f\n", count, ours, torchs);
  }
}
