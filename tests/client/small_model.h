// A perceptron of three layers, data for it, and the same training in one process to compare with.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "atoll/client/trainer.h"

namespace Atoll::client {

/// With chunks of 128 KiB: w1 is one, w2 three; b1 is small between large ones, the rest is gathered. Some
/// messages carry their tensors in the header (64 KiB and less), some behind it.
struct SmallModel {
  static constexpr int64_t kElements = 384 * 64 + 384 + 192 * 384 + 192 + 10 * 192 + 10;
  static constexpr int64_t kChunks = 6;  // Of one owner's layout.

  at::Tensor w1, b1, w2, b2, w3, b3;

  /// The same values for the same seed.
  explicit SmallModel(uint64_t seed) {
    uint64_t state = seed * 2654435761u + 1;
    auto make = [&](std::vector<int64_t> sizes) {
      at::Tensor values = at::zeros(sizes);
      float* data = values.data_ptr<float>();
      for (int64_t i = 0; i < values.numel(); ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        data[i] = (static_cast<float>(state >> 40) / static_cast<float>(1 << 24) - 0.5f) * 0.2f;
      }
      return values.requires_grad_(true);
    };
    w1 = make({384, 64});
    b1 = make({384});
    w2 = make({192, 384});
    b2 = make({192});
    w3 = make({10, 192});
    b3 = make({10});
  }
  std::vector<std::pair<std::string, at::Tensor>> named() const {
    return {{"w1", w1}, {"b1", b1}, {"w2", w2}, {"b2", b2}, {"w3", w3}, {"b3", b3}};
  }
  at::Tensor Loss(const at::Tensor& x, const at::Tensor& target) const {
    at::Tensor h = at::relu(at::addmm(b1, x, w1.t()));
    h = at::relu(at::addmm(b2, h, w2.t()));
    return at::cross_entropy_loss(at::addmm(b3, h, w3.t()), target);
  }
};

/// A batch that depends on (step, part) alone; the class is readable from the input.
struct TestBatch {
  at::Tensor x, target;
  TestBatch(int step, int part, int size = 16) {
    x = at::zeros({size, 64});
    target = at::zeros({size}, at::kLong);
    uint64_t state = static_cast<uint64_t>(step) * 7919 + static_cast<uint64_t>(part) * 104729 + 17;
    for (int i = 0; i < size; ++i) {
      for (int j = 0; j < 64; ++j) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x.data_ptr<float>()[i * 64 + j] = static_cast<float>(state >> 40) / static_cast<float>(1 << 24);
      }
      const int label = static_cast<int>((state >> 33) % 10);
      target.data_ptr<int64_t>()[i] = label;
      x.data_ptr<float>()[i * 64 + label] += 2.0f;
    }
  }
};

/// torch.optim.Adam(fused=True) in this process.
class LocalAdam {
 public:
  LocalAdam(const SmallModel& model, shard_optim::AdamOptions options) : options_(options) {
    for (auto& [name, tensor] : model.named()) {
      parameters_.push_back(tensor.detach());
      m_.push_back(at::zeros_like(parameters_.back()));
      v_.push_back(at::zeros_like(parameters_.back()));
      steps_.push_back(at::zeros({}));
    }
  }
  void Step(std::vector<at::Tensor> gradients) {
    for (at::Tensor& step : steps_) step.add_(1);
    at::_fused_adam_(parameters_, gradients, m_, v_, {}, steps_, options_.lr, options_.beta1, options_.beta2,
                     options_.weight_decay, options_.eps, /*amsgrad=*/false, /*maximize=*/false);
  }

 private:
  const shard_optim::AdamOptions options_;
  std::vector<at::Tensor> parameters_, m_, v_, steps_;
};

/// The gradients of one batch, taken from the parameters.
inline std::vector<at::Tensor> GradientsOf(const SmallModel& model, const TestBatch& batch) {
  model.Loss(batch.x, batch.target).backward();
  std::vector<at::Tensor> gradients;
  for (auto& [name, tensor] : model.named()) {
    gradients.push_back(std::exchange(tensor.mutable_grad(), at::Tensor()));
  }
  return gradients;
}

}  // namespace Atoll::client
