// Runs of torch.optim.Adam(fused=True), recorded live with the Python of the same torch (record_adam.py): a
// committed recording would hold the values of one machine's libraries.
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

/// All recordings, made once a process. Empty if that Python cannot import torch: the test then skips loudly.
const std::vector<Recorded>& Recordings();

/// Skips the calling test, so that ctest shows it, where there are no recordings.
#define ATOLL_NEEDS_RECORDINGS()                                                                       \
  if (Recordings().empty()) {                                                                          \
    std::puts("ATOLL_TEST_SKIPPED: " ATOLL_TEST_PYTHON " cannot import torch: no parity with Python"); \
    GTEST_SKIP();                                                                                      \
  }

}  // namespace Atoll::shard_optim
