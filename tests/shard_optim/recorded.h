// Runs of torch.optim.Adam(fused=True), recorded live by record_adam.py.
#pragma once

#include <string>
#include <vector>

#include "atoll/shard_optim/layout_core.h"
#include "atoll/shard_optim/options.h"

namespace Atoll::shard_optim {

struct Recorded {
  static constexpr int kSteps = 50;
  int workers = 1;
  AdamOptions optimizer;
  bool late = false;  ///< The last parameter has no gradient in the first two steps.
  std::vector<ParameterSpec> parameters;
  using Tensors = std::vector<std::vector<float>>;  // By parameter.
  Tensors start;
  std::vector<std::vector<Tensors>> gradients;  // By step, worker.
  Tensors end, exp_avg, exp_avg_sq;
};

/// All recordings, made once a process. Empty if Python could not (ATOLL_NEEDS_PYTHON).
const std::vector<Recorded>& Recordings();

}  // namespace Atoll::shard_optim
