// TensorPipe's connection over a Stream: encodes and decodes its frames, and checks what they mean before
// TensorPipe acts on them.
#pragma once

#include <memory>
#include <string>

#include "atoll/transport/frame_check.h"
#include "atoll/transport/link.h"
#include "atoll/transport/stream.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::transport {

/// What the frames of one connection are checked against.
struct Inspection {
  std::shared_ptr<const ChannelTable> channels;
  MessageLimits limits;
  std::shared_ptr<Link> link;    ///< Of a pipe's first connection; else null.
  std::shared_ptr<Route> route;  ///< Of connections that we opened; else null.

  /// The longest frame that TensorPipe may be given.
  size_t MaxFrameBytes() const { return limits.max_header_bytes + 256 * limits.max_tensors + (64 << 10); }
  /// Checks a decoded object, by its type, and puts our own addresses where TensorPipe will connect next.
  absl::Status Inspect(tensorpipe::AbstractNopHolder& object) const;
};

/// The address by which TensorPipe reaches listener `listener` of the process at the end of `route`.
std::string RouteAddress(const Route& route, int listener);

/// Thread-safe. Given to TensorPipe, which drops it to close it.
class Connection final : public tensorpipe::transport::Connection {
 public:
  Connection(std::shared_ptr<Stream> stream, Inspection inspection)
      : stream_(std::move(stream)), inspection_(std::make_shared<Inspection>(std::move(inspection))) {}
  ~Connection() override { close(); }

  void read(read_callback_fn fn) override;
  void read(void* ptr, size_t length, read_callback_fn fn) override;
  void write(const void* ptr, size_t length, write_callback_fn fn) override;
  void read(tensorpipe::AbstractNopHolder& object, read_nop_callback_fn fn) override;
  void write(const tensorpipe::AbstractNopHolder& object, write_callback_fn fn) override;
  void setId(std::string id) override {}
  void close() override;

 private:
  const std::shared_ptr<Stream> stream_;
  const std::shared_ptr<const Inspection> inspection_;
};

}  // namespace Atoll::transport
