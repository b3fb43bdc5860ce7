// One pipe, over any of the ways that are compared: TensorPipe's own Pipe over our transports ("raw:...") or over its
// own uv ("uv"), and transport::Pipe ("pipe:..."). Errors end the process: the other end has gone, or the bench is
// wrong.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace Atoll::bench {

struct Piece {
  char* data;
  size_t bytes;
};

/// Callbacks run on a loop thread. At most one Await, and none before the Read that it asks for has ended.
class Wire {
 public:
  using Headed = std::function<void(std::string header, const std::vector<size_t>& bytes)>;
  virtual ~Wire() = default;
  /// The pieces stay until `done`.
  virtual void Write(std::string header, const std::vector<Piece>& pieces, std::function<void()> done) = 0;
  /// The next message. If it has pieces, Read must follow.
  virtual void Await(Headed headed) = 0;
  virtual void Read(const std::vector<Piece>& into, std::function<void()> done) = 0;
};

/// One end, of which there are as many wires as callers.
class Station {
 public:
  virtual ~Station() = default;
  virtual std::string address() const = 0;
  virtual void OnWire(std::function<void(std::shared_ptr<Wire>)> on_wire) = 0;
  virtual std::shared_ptr<Wire> Connect(const std::string& address) = 0;
};

/// `way`: "uv", or raw: or pipe: and tcp or unix, with +cma or +basic (without either the
/// channel is mpt) and with +tls.
std::unique_ptr<Station> OpenStation(absl::string_view way, const std::string& name);

}  // namespace Atoll::bench
