#include "atoll/rpc/sink.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <ATen/ops/from_blob.h>
#include <c10/core/TensorOptions.h>

#include "absl/strings/str_cat.h"

namespace Atoll::rpc {
namespace {

constexpr size_t kPiece = size_t{2} << 20;
// A process may have 65,530 mappings (vm.max_map_count). Larger sinks have larger pieces.
constexpr size_t kMaxPieces = 1024;

size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

absl::Status NoMapping(const char* call, size_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no mapping for ", bytes, " bytes that nobody wants: ", call, ": ", strerror(errno)));
}

}  // namespace

absl::StatusOr<at::Tensor> Sink(size_t bytes) {
  const size_t piece = std::max(kPiece, RoundUp(bytes / kMaxPieces, kPiece));
  const size_t mapped = RoundUp(bytes, piece);
  const int memory = memfd_create("atoll-sink", MFD_CLOEXEC);
  if (memory < 0) return NoMapping("memfd_create", bytes);
  absl::Status status;
  if (ftruncate(memory, static_cast<off_t>(piece)) != 0) status = NoMapping("ftruncate", bytes);
  char* start = nullptr;
  if (status.ok()) {
    void* range = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) {
      status = NoMapping("mmap", bytes);
    } else {
      start = static_cast<char*>(range);
    }
  }
  for (size_t at = 0; status.ok() && at < mapped; at += piece) {
    if (mmap(start + at, piece, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0) == MAP_FAILED) {
      status = NoMapping("mmap", bytes);
    }
  }
  close(memory);
  if (!status.ok()) {
    if (start != nullptr) munmap(start, mapped);
    return status;
  }
  return at::from_blob(
      start, {static_cast<int64_t>(bytes)}, [mapped](void* range) { munmap(range, mapped); }, at::kByte);
}

}  // namespace Atoll::rpc
