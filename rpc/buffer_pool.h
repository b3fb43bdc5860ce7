// Memory for tensors on their way in: page-aligned and used again, since fresh pages cost several times the
// copy into them. One an agent, held by shared_ptr: tensors given out keep it alive. Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  /// Keeps at most `keep_bytes` that nobody uses.
  static std::shared_ptr<BufferPool> Create(size_t keep_bytes);
  ~BufferPool();

  /// A contiguous tensor as `meta` says, of undefined content; its memory comes back here when the last
  /// reference to its storage is dropped. ResourceExhausted where the system has no memory. Small ones, and
  /// those on GPUs, come from the allocators of LibTorch.
  absl::StatusOr<at::Tensor> Allocate(const TensorMeta& meta);

  size_t kept_bytes() const;

 private:
  explicit BufferPool(size_t keep_bytes) : keep_bytes_(keep_bytes) {}
  void* Take(size_t bytes);
  void Return(void* data, size_t bytes);

  const size_t keep_bytes_;
  mutable absl::Mutex mu_;
  std::map<size_t, std::vector<void*>> free_ ABSL_GUARDED_BY(mu_);  // By size class.
  size_t free_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace Atoll::rpc
