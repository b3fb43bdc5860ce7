// Tensors on GPUs in calls: on which of the peer's devices they land, and in what order. Internal to rpc. It
// speaks to CUDA through LibTorch's generic devices alone, so that a process on the CPU links and loads
// nothing of it.
//
//   caller's current stream ──event──> message's stream ── copy out ~~~ copy in ── message's stream = the
//   handler's
//            ^── at the end of a loan ──┘                                           current stream
//
// Nobody waits on the host: order is handed on as events, and storage is kept for the streams that use it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/transport/pipe.h"

namespace Atoll::rpc {

/// Our index -> the peer's; kCpuIndex on either side is the CPU.
using DeviceMap = std::map<int, int>;

/// GPUs that LibTorch sees here; 0 where its CUDA half is not loaded.
int GpuCount();
/// InvalidArgument for an index below kCpuIndex, one of ours that is not here, two of ours to one of the
/// peer's (a reply could not go back), or the CPU to the CPU. What the peer has is seen when its tensors are
/// sent.
absl::Status CheckDeviceMaps(const std::map<std::string, DeviceMap>& maps, int gpu_count);
/// Where replies to a peer with the map `theirs` (of what it sends us) go: back; else as `ours` says.
DeviceMap ReplyMap(const DeviceMap& theirs, const DeviceMap& ours);

/// Where tensors of a message to `peer` land.
struct Destination {
  DeviceMap map;
  base::MemberId peer;
  bool reply = false;
};
/// Of a tensor on `device`. FailedPrecondition, which names both, for a GPU that the map does not have.
absl::StatusOr<c10::Device> LandingOf(const Destination& destination, c10::Device device);

transport::Device ToTransport(c10::Device device);
c10::Device FromTransport(const transport::Device& device);

/// The streams of one message: one of LibTorch's pool for each GPU that its tensors lie on, and the stream of
/// the thread that they came from. Empty, and then free of cost, for tensors on the CPU. Copies name the same
/// streams. Members throw what LibTorch throws. Thread-compatible.
class Streams {
 public:
  bool empty() const { return entries_.empty(); }
  /// The one of `device`; taken at the first call. Null handle for the CPU.
  void Add(c10::Device device);
  void* Handle(c10::Device device) const;
  /// Ours wait for what the streams that were current when each was added hold now.
  void AwaitOrigins() const;
  /// Those streams wait for what ours hold now: the end of a loan.
  void ReturnToOrigins() const;
  /// The calling thread's current streams wait for what ours hold now, and `tensors` are kept for them.
  void CurrentAwait(absl::Span<const at::Tensor> tensors) const;
  /// The storage of `tensor` is not used again by others before ours are done with what they then hold.
  void Keep(const at::Tensor& tensor) const;
  std::vector<c10::Stream> ours() const;
  std::vector<c10::Stream> origins() const;

 private:
  struct Entry {
    c10::Stream ours;
    c10::Stream origin;
  };
  std::vector<Entry> entries_;
};

/// While it lives, `streams` are current in this thread.
class StreamScope {
 public:
  explicit StreamScope(const Streams& streams) : StreamScope(streams.ours()) {}
  explicit StreamScope(const std::vector<c10::Stream>& streams);

 private:
  std::optional<c10::MultiStreamGuard> guard_;
};

/// Runs `work`; what it throws becomes an Internal status that begins with `what`.
template <class F>
absl::Status Guarded(absl::string_view what, F work) {
  try {
    work();
  } catch (...) {
    return absl::InternalError(absl::StrCat(what, ": ", ExceptionText()));
  }
  return absl::OkStatus();
}

}  // namespace Atoll::rpc
