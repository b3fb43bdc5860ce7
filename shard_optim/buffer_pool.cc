#include "atoll/shard_optim/buffer_pool.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace Atoll::shard_optim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

// Few classes, so that chunks of nearly one size share: whole pages, above 64 KiB steps of an eighth.
size_t SizeClass(size_t bytes) {
  size_t step = kPage;
  while (step * 16 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

void* Allocate(size_t bytes) {
  size_t align = bytes >= kHugePage ? kHugePage : kPage;
  void* memory = std::aligned_alloc(align, (bytes + align - 1) / align * align);
  if (memory == nullptr) return nullptr;
  if (bytes >= kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  std::memset(memory, 0, bytes);
  return memory;
}

}  // namespace

std::shared_ptr<BufferPool> BufferPool::Create(size_t limit_bytes) {
  return std::shared_ptr<BufferPool>(new BufferPool(limit_bytes));
}

BufferPool::~BufferPool() {
  for (auto& [bytes, buffers] : kept_) {
    for (void* memory : buffers) std::free(memory);
  }
}

absl::StatusOr<at::Tensor> BufferPool::Take(int64_t elements, size_t extra_bytes) {
  const size_t bytes = SizeClass(static_cast<size_t>(elements) * sizeof(float));
  void* memory = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (bytes_out_ + bytes > limit_bytes_ + extra_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(bytes_out_,
                                                       " bytes of buffers are in use, the limit is ",
                                                       limit_bytes_, "; ", bytes, " more asked for"));
    }
    bytes_out_ += bytes;
    auto kept = kept_.find(bytes);
    if (kept != kept_.end() && !kept->second.empty()) {
      memory = kept->second.back();
      kept->second.pop_back();
      bytes_kept_ -= bytes;
    }
  }
  if (memory == nullptr) memory = Allocate(bytes);
  if (memory == nullptr) {
    absl::MutexLock lock(&mu_);
    bytes_out_ -= bytes;
    return absl::ResourceExhaustedError(absl::StrCat("no memory for a buffer of ", bytes, " bytes"));
  }
  return at::from_blob(
      memory, {elements},
      [pool = shared_from_this(), bytes](void* returned) { pool->Return(returned, bytes); },
      at::TensorOptions().dtype(at::kFloat));
}

void BufferPool::Return(void* memory, size_t bytes) {
  {
    absl::MutexLock lock(&mu_);
    bytes_out_ -= bytes;
    if (bytes_kept_ + bytes <= limit_bytes_) {
      bytes_kept_ += bytes;
      kept_[bytes].push_back(memory);
      return;
    }
  }
  std::free(memory);
}

size_t BufferPool::bytes_out() const {
  absl::MutexLock lock(&mu_);
  return bytes_out_;
}

}  // namespace Atoll::shard_optim
