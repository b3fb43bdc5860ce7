#include "atoll/rpc/buffer_pool.h"

#include <sys/mman.h>

#include <bit>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "absl/strings/str_cat.h"
#include "atoll/rpc/exception_text.h"

namespace Atoll::rpc {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugeBytes = size_t{2} << 20;
constexpr size_t kSmallBytes = 64 << 10;

// Eight classes between two powers of two: at most an eighth is wasted.
size_t ClassOf(size_t bytes) {
  size_t step = std::max(std::bit_floor(bytes) / 8, kPageBytes);
  return (bytes + step - 1) / step * step;
}

}  // namespace

std::shared_ptr<BufferPool> BufferPool::Create(size_t keep_bytes) {
  return std::shared_ptr<BufferPool>(new BufferPool(keep_bytes));
}

BufferPool::~BufferPool() {
  for (auto& [bytes, buffers] : free_) {
    for (void* data : buffers) munmap(data, bytes);
  }
}

absl::StatusOr<at::Tensor> BufferPool::Allocate(const TensorMeta& meta) {
  size_t bytes = meta.bytes();
  at::TensorOptions options = at::TensorOptions().dtype(meta.dtype);
  try {
    if (!meta.device.is_cpu()) return at::empty(meta.sizes, options.device(meta.device));
    if (bytes <= kSmallBytes) return at::empty(meta.sizes, options);
    size_t class_bytes = ClassOf(bytes);
    void* data = Take(class_bytes);
    if (data == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for a tensor of ", bytes, " bytes"));
    }
    return at::from_blob(
        data, meta.sizes,
        [pool = shared_from_this(), class_bytes](void* returned) { pool->Return(returned, class_bytes); },
        options);
  } catch (...) {
    return absl::ResourceExhaustedError(absl::StrCat("no tensor of ", bytes, " bytes: ", ExceptionText()));
  }
}

void* BufferPool::Take(size_t bytes) {
  {
    absl::MutexLock lock(&mu_);
    auto found = free_.find(bytes);
    if (found != free_.end() && !found->second.empty()) {
      void* data = found->second.back();
      found->second.pop_back();
      free_bytes_ -= bytes;
      return data;
    }
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  if (bytes >= 2 * kHugeBytes) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

void BufferPool::Return(void* data, size_t bytes) {
  {
    absl::MutexLock lock(&mu_);
    if (free_bytes_ + bytes <= keep_bytes_) {
      free_[bytes].push_back(data);
      free_bytes_ += bytes;
      return;
    }
  }
  munmap(data, bytes);
}

size_t BufferPool::kept_bytes() const {
  absl::MutexLock lock(&mu_);
  return free_bytes_;
}

}  // namespace Atoll::rpc
