// The reused memory of gathered buckets (those of several small parameters): where their gradients are
// collected, and where their new values arrive. Large parameters need none: they move straight from the
// gradient's storage and into the parameter's.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "atoll/client/parameters.h"
#include "atoll/shard_optim/layout_core.h"

namespace Atoll::client {

/// Different chunks may be used by different threads.
class Staging {
 public:
  explicit Staging(const shard_optim::Layout& layout);

  /// Whether the chunk is a slice of one parameter's memory.
  bool direct(int chunk) const { return !gather_[chunk].defined(); }
  /// Of a gathered chunk: the tensor that is sent. Its gaps hold zeros.
  const at::Tensor& gather(int chunk) const { return gather_[chunk]; }
  /// Of a gathered chunk: where its new value arrives.
  const at::Tensor& landing(int chunk) const { return landing_[chunk]; }

  /// Copies a parameter's flat values to its places in the gather buffers.
  void Gather(const shard_optim::Layout& layout, int parameter, const at::Tensor& flat) const;
  /// Copies what arrived for a gathered chunk into its parameters.
  void Scatter(const shard_optim::Layout& layout, int chunk, const ParameterSet& parameters) const;

 private:
  std::vector<at::Tensor> gather_, landing_;  // By chunk; undefined for direct ones.
};

}  // namespace Atoll::client
