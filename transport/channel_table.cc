#include "atoll/transport/channel_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace Atoll::transport {

absl::StatusOr<Device> FromTensorPipe(const tensorpipe::Device& device) {
  if (device.type == tensorpipe::kCpuDeviceType && device.index == 0) return Device{};
  if (device.type == tensorpipe::kCudaDeviceType && device.index >= 0 && device.index < 1024) {
    return Device{Device::Kind::kCuda, static_cast<int16_t>(device.index)};
  }
  return absl::NotFoundError("a device that is neither the CPU nor a GPU");
}

tensorpipe::Device ToTensorPipe(const Device& device) {
  return device.kind == Device::Kind::kCpu ? tensorpipe::Device(tensorpipe::kCpuDeviceType, 0)
                                           : tensorpipe::Device(tensorpipe::kCudaDeviceType, device.index);
}

std::string DeviceName(const Device& device) {
  return device.kind == Device::Kind::kCpu ? "cpu" : absl::StrCat("cuda:", device.index);
}

bool DevicePairs::Has(Device local, Device remote) const {
  return std::any_of(pairs_.begin(), pairs_.end(),
                     [&](const auto& pair) { return pair.first == local && pair.second == remote; });
}

void ChannelTable::Add(std::string name, std::shared_ptr<tensorpipe::channel::Context> context) {
  if (context == nullptr || !context->isViable()) return;
  entries_.push_back({std::move(name), context});
  unregistered_.push_back(std::move(context));
}

void ChannelTable::RegisterWith(tensorpipe::Context& core) {
  int64_t priority = static_cast<int64_t>(entries_.size());
  for (const Entry& entry : entries_) core.registerChannel(priority--, entry.name, entry.context.lock());
  unregistered_.clear();
}

ChannelTable::Selection ChannelTable::Select(const Remote& remote) const {
  Selection selection;
  for (const Entry& entry : entries_) {
    auto theirs = remote.find(entry.name);
    const std::shared_ptr<tensorpipe::channel::Context> context = entry.context.lock();
    if (theirs == remote.end() || context == nullptr) continue;
    for (const auto& [local_device, local_text] : context->deviceDescriptors()) {
      for (const auto& [remote_device, remote_text] : theirs->second) {
        if (!context->canCommunicateWithRemote(local_text, remote_text)) continue;
        selection.emplace(std::make_pair(local_device, remote_device), entry.name);  // The first stays.
      }
    }
  }
  return selection;
}

size_t ChannelTable::ConnectionsFor(const std::string& name) const {
  for (const Entry& entry : entries_) {
    const std::shared_ptr<tensorpipe::channel::Context> context = entry.context.lock();
    if (entry.name == name && context != nullptr) return context->numConnectionsNeeded();
  }
  return 0;
}

absl::StatusOr<DevicePairs> PairsOf(const ChannelTable::Selection& selection) {
  DevicePairs pairs;
  for (const auto& [devices, channel] : selection) {
    absl::StatusOr<Device> local = FromTensorPipe(devices.first);
    absl::StatusOr<Device> remote = FromTensorPipe(devices.second);
    if (!local.ok() || !remote.ok()) return absl::InvalidArgumentError("a channel for an unknown device");
    pairs.Add(*local, *remote);
  }
  return pairs;
}

}  // namespace Atoll::transport
