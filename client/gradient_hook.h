// Where LibTorch's autograd meets the trainer: the only file of the client that knows its engine.
#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"

namespace Atoll::client {

/// Runs on the thread of backward, after the parameter's gradient of this backward is complete and was added
/// to what `.grad` held. The callee may take it (TakeGradient), or leave it for the next to be added to.
using OnGradient = std::function<void()>;

/// LibTorch holds one such hook a tensor. FailedPrecondition if there is one.
absl::Status InstallGradientHook(const at::Tensor& parameter, OnGradient on_gradient);
void RemoveGradientHook(const at::Tensor& parameter);

/// From inside a hook: `callback` runs when this backward has ended well (not when it threw).
void AtEndOfBackward(std::function<void()> callback);

/// Takes the parameter's `.grad`, which is undefined then.
at::Tensor TakeGradient(const at::Tensor& parameter);

}  // namespace Atoll::client
