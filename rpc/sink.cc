#include "atoll/rpc/sink.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <ATen/ops/from_blob.h>
#include <c10/core/TensorOptions.h>

#include "absl/strings/str_cat.h"

namespace Atoll::rpc {
namespace {

constexpr size_t kPiece = size_t{2} << 20;
// A process may have 65,530 mappings (vm.max_map_count) in all. Larger sinks have larger pieces.
constexpr size_t kMaxPieces = 64;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

absl::Status NoMapping(const char* call, size_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no mapping for ", bytes, " bytes that nobody wants: ", call, ": ", strerror(errno)));
}

}  // namespace

absl::StatusOr<at::Tensor> Sink(size_t bytes) {
  const size_t piece = std::max(kPiece, RoundUp(bytes / kMaxPieces, kPiece));
  const size_t mapped = RoundUp(bytes, piece);
  void* range = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return NoMapping("mmap", bytes);
  char* const start = static_cast<char*>(range);
  // Shared, so that mremap of no bytes makes another view of it: without a descriptor, of which there may be none.
  bool all =
      mmap(start, piece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  for (size_t at = piece; all && at < mapped; at += piece) {
    all = mremap(start, 0, piece, MREMAP_MAYMOVE | MREMAP_FIXED, start + at) != MAP_FAILED;
  }
  if (!all) {
    const absl::Status status = NoMapping("mremap", bytes);
    munmap(start, mapped);
    return status;
  }
  return at::from_blob(
      start, {static_cast<int64_t>(bytes)}, [mapped](void* range) { munmap(range, mapped); }, at::kByte);
}

}  // namespace Atoll::rpc
