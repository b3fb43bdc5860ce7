// Reused memory for chunks, so that a step touches no fresh page (a page fault costs 3 to 5 times the copy).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace Atoll::shard_optim {

/// Gives out float tensors whose memory comes back when their last reference ends, in any thread; each keeps
/// the pool alive. Memory is page-aligned, prefaulted, in huge pages where it is large. Thread-safe.
class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  /// At most `limit_bytes` are out at one time; what comes back is kept up to as much.
  static std::shared_ptr<BufferPool> Create(size_t limit_bytes);
  ~BufferPool();

  /// One dimension, content arbitrary. ResourceExhausted: beyond the limit, and beyond `extra_bytes` more
  /// that this request may use of; or the system has no memory.
  absl::StatusOr<at::Tensor> Take(int64_t elements, size_t extra_bytes = 0);
  size_t bytes_out() const;

 private:
  explicit BufferPool(size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  void Return(void* memory, size_t bytes);

  const size_t limit_bytes_;
  mutable absl::Mutex mu_;
  size_t bytes_out_ ABSL_GUARDED_BY(mu_) = 0;
  size_t bytes_kept_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<size_t, std::vector<void*>> kept_ ABSL_GUARDED_BY(mu_);  // By size.
};

}  // namespace Atoll::shard_optim
