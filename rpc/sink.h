// Memory for bytes that nobody wants, so that what is refused for its size costs no memory. Internal to rpc.
#pragma once

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"

namespace Atoll::rpc {

/// `bytes` (not 0) of address space that lie again and again on the same few MiB of memory: written, and never
/// read. A tensor of bytes on the CPU. ResourceExhausted where the system gives no mapping.
absl::StatusOr<at::Tensor> Sink(size_t bytes);

}  // namespace Atoll::rpc
