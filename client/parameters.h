// A model's parameters as the trainer moves them: checked, and each as one flat run of memory.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "atoll/client/trainer.h"
#include "atoll/shard_optim/layout_core.h"

namespace Atoll::client {

class ParameterSet {
 public:
  /// Checks what Trainer::Attach requires. A tensor under two names stands here once.
  static absl::StatusOr<ParameterSet> Create(const NamedTensors& named);

  int count() const { return static_cast<int>(tensors_.size()); }
  const std::string& name(int parameter) const { return specs_[parameter].name; }
  const at::Tensor& tensor(int parameter) const { return tensors_[parameter]; }
  const std::vector<shard_optim::ParameterSpec>& specs() const { return specs_; }

  /// Elements begin .. end of a parameter in memory order, as a view of its own storage.
  at::Tensor Slice(int parameter, int64_t begin, int64_t end) const;
  float* Data(int parameter) const { return flat_[parameter].data_ptr<float>(); }

  /// A gradient of the parameter as a flat tensor in the parameter's memory order: a view of the gradient if
  /// its strides allow, else a copy. InvalidArgument if it is no dense fp32 CPU tensor of that shape;
  /// FailedPrecondition if the parameter's memory was exchanged.
  absl::StatusOr<at::Tensor> Flatten(int parameter, const at::Tensor& gradient) const;

  /// FailedPrecondition names a parameter whose storage was exchanged since Create (set_data, resize).
  absl::Status CheckInPlace() const;
  /// Says to autograd that the values changed.
  void BumpVersions() const;

 private:
  bool InPlace(int parameter) const;
  absl::Status Exchanged(int parameter) const;

  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> flat_;  // Of each: its memory as one dimension, without history.
  std::vector<shard_optim::ParameterSpec> specs_;
};

}  // namespace Atoll::client
