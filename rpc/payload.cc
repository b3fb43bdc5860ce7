#include <utility>

#include <c10/core/ScalarType.h>

#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

OutTensor Copy(at::Tensor tensor) { return OutTensor{std::move(tensor), false, nullptr}; }

OutTensor Lend(at::Tensor tensor, absl::AnyInvocable<void()> on_return) {
  return OutTensor{std::move(tensor), true, std::move(on_return)};
}

size_t TensorMeta::bytes() const {
  size_t count = c10::elementSize(dtype);
  for (int64_t size : sizes) count *= static_cast<size_t>(size);
  return count;
}

}  // namespace Atoll::rpc
