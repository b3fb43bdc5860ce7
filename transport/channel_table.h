// Which of TensorPipe's channels this process has, and between which devices of ours and of a peer they
// carry tensors. TensorPipe works the same out for itself, but throws in a thread of its own when a
// message then needs a pair that has none; so we know beforehand.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "atoll/transport/pipe.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::transport {

/// TensorPipe's device as ours. NotFound for a kind that we do not know or an index out of range.
absl::StatusOr<Device> FromTensorPipe(const tensorpipe::Device& device);
tensorpipe::Device ToTensorPipe(const Device& device);
std::string DeviceName(const Device& device);  // "cpu", "cuda:1"

/// The pairs (ours, the peer's) between which tensors can travel.
class DevicePairs {
 public:
  void Add(Device local, Device remote) { pairs_.emplace_back(local, remote); }
  bool Has(Device local, Device remote) const;

 private:
  std::vector<std::pair<Device, Device>> pairs_;
};

class ChannelTable {
 public:
  using DeviceDescriptors = std::unordered_map<tensorpipe::Device, std::string>;
  using Remote = std::unordered_map<std::string, DeviceDescriptors>;
  using Selection = std::unordered_map<std::pair<tensorpipe::Device, tensorpipe::Device>, std::string>;

  /// Added in falling order of priority; not viable ones are left out.
  void Add(std::string name, std::shared_ptr<tensorpipe::channel::Context> context);
  /// Registers all with `core`, which owns them from then on: the table only refers to them, since the
  /// channel mpt holds the transport, which holds the table.
  void RegisterWith(tensorpipe::Context& core);
  /// The choice that TensorPipe's core makes for a peer with `remote`: it must be made the same way.
  Selection Select(const Remote& remote) const;
  /// Number of connections that a pipe opens for channel `name`; 0 if there is none.
  size_t ConnectionsFor(const std::string& name) const;

 private:
  struct Entry {
    std::string name;
    std::weak_ptr<tensorpipe::channel::Context> context;
  };
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<tensorpipe::channel::Context>> unregistered_;
};

/// InvalidArgument if a device of the peer's is none that we know.
absl::StatusOr<DevicePairs> PairsOf(const ChannelTable::Selection& selection);

}  // namespace Atoll::transport
