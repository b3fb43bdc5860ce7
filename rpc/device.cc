#include "atoll/rpc/device.h"

#include <limits>
#include <set>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"

namespace Atoll::rpc {
namespace {

using c10::impl::VirtualGuardImpl;

std::string Name(int index) { return index == kCpuIndex ? "cpu" : absl::StrCat("cuda:", index); }

// `after` goes on when `before` has done what it holds now.
void Follow(const c10::Stream& after, const c10::Stream& before) {
  if (after == before) return;
  c10::Event event(before.device_type());
  event.record(before);
  event.block(after);
}

}  // namespace

int GpuCount() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
}

absl::Status CheckDeviceMaps(const std::map<std::string, DeviceMap>& maps, int gpu_count) {
  for (const auto& [peer, map] : maps) {
    std::set<int> taken;
    for (const auto& [ours, theirs] : map) {
      auto refuse = [&, peer = peer, ours = ours, theirs = theirs](absl::string_view why) {
        return absl::InvalidArgumentError(
            absl::StrCat("device map for ", peer, ": ", Name(ours), " to ", Name(theirs), ": ", why));
      };
      if (ours < kCpuIndex || theirs < kCpuIndex || theirs > std::numeric_limits<c10::DeviceIndex>::max()) {
        return refuse("a device's index is 0 or more, or kCpuIndex");
      }
      if (ours == kCpuIndex && theirs == kCpuIndex) return refuse("that is so without a map");
      if (ours >= gpu_count) return refuse(absl::StrCat("there are ", gpu_count, " GPUs here"));
      if (!taken.insert(theirs).second) return refuse("another device of ours goes there already");
    }
  }
  return absl::OkStatus();
}

DeviceMap ReplyMap(const DeviceMap& theirs, const DeviceMap& ours) {
  DeviceMap map;
  for (const auto& [from, to] : theirs) map.emplace(to, from);
  map.insert(ours.begin(), ours.end());
  return map;
}

absl::StatusOr<c10::Device> LandingOf(const Destination& destination, c10::Device device) {
  const int index = device.is_cpu() ? kCpuIndex : device.index();
  auto found = destination.map.find(index);
  if (found != destination.map.end()) {
    if (found->second == kCpuIndex) return c10::Device(c10::kCPU);
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(found->second));
  }
  if (device.is_cpu()) return device;
  return absl::FailedPreconditionError(absl::StrCat(
      "it is on ", device.str(), ", and no device map says where ",
      destination.reply ? "a reply with it lands at " : "it lands at ", destination.peer.ToString(),
      " (AgentOptions::device_maps", destination.reply ? " of the caller)" : ")"));
}

transport::Device ToTransport(c10::Device device) {
  if (device.is_cpu()) return {};
  return {transport::Device::Kind::kCuda, device.index()};
}

c10::Device FromTransport(const transport::Device& device) {
  if (device.kind == transport::Device::Kind::kCpu) return c10::Device(c10::kCPU);
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device.index));
}

void Streams::Add(c10::Device device) {
  if (device.is_cpu()) return;
  for (const Entry& entry : entries_) {
    if (entry.ours.device() == device) return;
  }
  VirtualGuardImpl guard(device.type());
  entries_.push_back({guard.getStreamFromGlobalPool(device), guard.getStream(device)});
}

void* Streams::Handle(c10::Device device) const {
  for (const Entry& entry : entries_) {
    if (entry.ours.device() == device) return entry.ours.native_handle();
  }
  return nullptr;
}

void Streams::AwaitOrigins() const {
  for (const Entry& entry : entries_) Follow(entry.ours, entry.origin);
}

void Streams::ReturnToOrigins() const {
  for (const Entry& entry : entries_) Follow(entry.origin, entry.ours);
}

void Streams::CurrentAwait(absl::Span<const at::Tensor> tensors) const {
  for (const Entry& entry : entries_) {
    VirtualGuardImpl guard(entry.ours.device_type());
    const c10::Stream current = guard.getStream(entry.ours.device());
    if (current == entry.ours) continue;
    Follow(current, entry.ours);
    for (const at::Tensor& tensor : tensors) {
      if (tensor.device() == current.device())
        guard.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
    }
  }
}

void Streams::Keep(const at::Tensor& tensor) const {
  for (const Entry& entry : entries_) {
    if (tensor.device() != entry.ours.device()) continue;
    VirtualGuardImpl(tensor.device().type()).recordDataPtrOnStream(tensor.storage().data_ptr(), entry.ours);
  }
}

std::vector<c10::Stream> Streams::ours() const {
  std::vector<c10::Stream> streams;
  for (const Entry& entry : entries_) streams.push_back(entry.ours);
  return streams;
}

std::vector<c10::Stream> Streams::origins() const {
  std::vector<c10::Stream> streams;
  for (const Entry& entry : entries_) streams.push_back(entry.origin);
  return streams;
}

StreamScope::StreamScope(const std::vector<c10::Stream>& streams) {
  if (!streams.empty()) guard_.emplace(streams);
}

void Received::OnConsumed() const {
  if (streams == nullptr) return;
  absl::Status status = Guarded("ordering what was received", [&] { streams->CurrentAwait(tensors); });
  // A device that failed: its next use says so.
  if (!status.ok()) ATOLL_LOG(kError) << status.message();
}

}  // namespace Atoll::rpc
