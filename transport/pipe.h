// One connection between two processes of a job: ordered messages of a header and tensors' bytes.
// What is behind it (TensorPipe over our own TCP and Unix-socket transports) shows nowhere above
// this folder.
//
//   Endpoint (one a rank) --Connect--> Pipe  <== the peer's Endpoint --OnPipe--> Pipe
//
// A cut connection ends a Pipe for good; sessions that outlive it are `rpc`'s.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "atoll/base/ids.h"

namespace Atoll::transport {

/// What a pipe is for. Control and bulk travel apart, so that a heartbeat never waits behind 64 MiB.
enum class Lane : uint8_t { kControl = 0, kBulk = 1 };

/// Where bytes lie.
struct Device {
  enum class Kind : uint8_t { kCpu = 0, kCuda = 1 };
  Kind kind = Kind::kCpu;
  int16_t index = 0;  ///< Of the GPU; 0 for the CPU.
  friend bool operator==(const Device&, const Device&) = default;
};

/// A run of contiguous bytes, not owned. On a GPU all work on it is ordered on `cuda_stream`
/// (a cudaStream_t of the device): a write starts after what the stream holds when Write is called, and
/// the stream's later work sees what a read brought.
struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  Device device;
  void* cuda_stream = nullptr;
};

/// What an endpoint sends and takes at most.
struct MessageLimits {
  size_t max_header_bytes = 16 << 20;
  size_t max_tensors = 4096;
  size_t max_tensor_bytes = size_t{1} << 40;  ///< Each.
};

/// What is sent. The buffers are lent until the write's callback.
struct Message {
  std::string header;           ///< At most MessageLimits::max_header_bytes.
  std::vector<Buffer> tensors;  ///< At most MessageLimits::max_tensors.
  /// Where the receiver should place each tensor; empty: all on its CPU. Else one per tensor.
  std::vector<Device> targets;
};

/// What is announced to the receiver before any tensor's bytes move.
struct Descriptor {
  std::string header;
  struct Tensor {
    size_t bytes = 0;
    Device source;  ///< As the sender names it.
    Device target;  ///< One of ours, as the sender asked for; checked to exist.
  };
  std::vector<Tensor> tensors;
};

/// An authenticated peer. The handshake proved it: an impostor without the job key gets no Pipe.
struct PeerInfo {
  base::MemberId member;
  Lane lane = Lane::kControl;
  std::string address;     ///< "127.0.0.1:4711" or "unix:@atoll-...": for logs and errors.
  bool initiated = false;  ///< We connected (false: we accepted).
};

/// Whether a Write failed because of its message alone (InvalidArgument: above a limit of ours, or
/// malformed; FailedPrecondition: no way to a device): nothing of it was sent, and the pipe goes on. The
/// callback has then run inside Write. Every other error of a Write is the pipe's, whatever its code.
bool IsMessageError(const absl::Status& status);
/// `status` as one that IsMessageError: for what implements Pipe.
absl::Status MessageError(absl::Status status);

/// Held by shared_ptr; thread-safe. Callbacks run exactly once each and without locks; they must not wait,
/// nor throw: that breaks the endpoint (Endpoint::OnBroken). Those of reads run on the endpoint's loop
/// thread, never inside a call to a pipe. That of a Write runs there, or inside this Write, or inside a Write
/// to another pipe of the endpoint. The first error of the pipe sticks: every later callback gets it.
/// Destroying the last reference closes. In a child of fork all callbacks get FailedPrecondition, inline, and
/// nothing is closed: the connection is the parent's.
class Pipe {
 public:
  virtual ~Pipe() = default;

  /// Sends `message`; `done` returns the loan of its buffers: OK says that the bytes were handed to the
  /// kernel or copied out (for CUDA: enqueued on the stream), not that the peer has read them. The limits are
  /// Endpoint::limits() here and the peer's there: a message above the peer's closes the pipe.
  virtual void Write(Message message, absl::AnyInvocable<void(absl::Status)> done) = 0;

  /// Waits for the next message. At most one ReadDescriptor may be outstanding, and none between a
  /// descriptor with tensors and the completion of its Read. A descriptor beyond Endpoint::limits() closes
  /// the pipe with InvalidArgument before anything is allocated.
  virtual void ReadDescriptor(absl::AnyInvocable<void(absl::StatusOr<Descriptor>)> done) = 0;

  /// Receives the tensors announced last, each into its buffer (sizes as announced, devices as
  /// targeted). Not called for a descriptor without tensors.
  virtual void Read(std::vector<Buffer> into, absl::AnyInvocable<void(absl::Status)> done) = 0;

  /// Ends it: outstanding and later operations complete with `reason`. Idempotent, does not wait.
  virtual void Close(absl::Status reason) = 0;

  virtual const PeerInfo& peer() const = 0;

  /// Whether tensors can travel from `ours` to `theirs`: both devices exist, and a channel leads there. A
  /// Write for which it says no fails with a FailedPrecondition that IsMessageError.
  virtual bool Reaches(Device ours, Device theirs) const { return true; }
};

}  // namespace Atoll::transport
