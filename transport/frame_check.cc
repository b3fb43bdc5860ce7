#include "atoll/transport/frame_check.h"

#include "absl/strings/str_cat.h"

namespace Atoll::transport {
namespace {

// libnop's prefixes (nop/base/encoding_byte.h). Tables, errors and handles never occur in TensorPipe.
class Walker {
 public:
  explicit Walker(absl::string_view bytes) : bytes_(bytes) {}

  absl::Status Walk() {
    if (!Value(0) || at_ != bytes_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a malformed frame of ", bytes_.size(), " bytes, at byte ", at_));
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int kMaxDepth = 12;

  size_t left() const { return bytes_.size() - at_; }
  bool Skip(uint64_t size) {
    if (size > left()) return false;
    at_ += size;
    return true;
  }
  bool Byte(uint8_t* byte) {
    if (left() == 0) return false;
    *byte = static_cast<uint8_t>(bytes_[at_++]);
    return true;
  }
  // Bytes that follow the prefix of an integer; -1 if it is none.
  static int IntegerBytes(uint8_t prefix) {
    if (prefix <= 0x7f || prefix >= 0xc0) return 0;
    if (prefix > 0x87) return -1;
    return 1 << (prefix & 3);
  }
  bool Integer() {
    uint8_t prefix;
    if (!Byte(&prefix)) return false;
    const int size = IntegerBytes(prefix);
    return size >= 0 && Skip(size);
  }
  bool Count(uint64_t* count) {
    uint8_t prefix;
    if (!Byte(&prefix) || prefix > 0x83) return false;
    if (prefix <= 0x7f) {
      *count = prefix;
      return true;
    }
    *count = 0;
    const int size = IntegerBytes(prefix);
    for (int i = 0; i < size; ++i) {
      uint8_t byte;
      if (!Byte(&byte)) return false;
      *count |= static_cast<uint64_t>(byte) << (8 * i);
    }
    return true;
  }
  bool Values(uint64_t per_element, int depth) {
    uint64_t count;
    // Each value takes a byte at least: a wild count fails here, not after as many turns.
    if (!Count(&count) || count > left() / per_element) return false;
    for (uint64_t i = 0; i < count * per_element; ++i) {
      if (!Value(depth + 1)) return false;
    }
    return true;
  }
  bool Value(int depth) {
    uint8_t prefix;
    if (depth > kMaxDepth || !Byte(&prefix)) return false;
    if (const int size = IntegerBytes(prefix); size >= 0) return Skip(size);
    uint64_t size;
    switch (prefix) {
      case 0x88:  // F32
        return Skip(4);
      case 0x89:  // F64
        return Skip(8);
      case 0xb8:  // Variant
        return Integer() && Value(depth + 1);
      case 0xb9:  // Structure
      case 0xba:  // Array
        return Values(1, depth);
      case 0xbb:  // Map
        return Values(2, depth);
      case 0xbc:  // Binary
      case 0xbd:  // String
        return Count(&size) && Skip(size);
      case 0xbe:  // Nil
        return true;
      default:
        return false;
    }
  }

  const absl::string_view bytes_;
  size_t at_ = 0;
};

absl::Status Bad(absl::string_view what) { return absl::InvalidArgumentError(what); }

}  // namespace

absl::Status WalkFrame(absl::string_view frame) { return Walker(frame).Walk(); }

absl::Status DecodeFrame(absl::string_view frame, tensorpipe::AbstractNopHolder& holder) {
  absl::Status walked = WalkFrame(frame);
  if (!walked.ok()) return walked;
  tensorpipe::NopReader reader(reinterpret_cast<const uint8_t*>(frame.data()), frame.size());
  nop::Status<void> status = holder.read(reader);
  if (status.has_error()) return Bad(absl::StrCat("an unexpected frame: ", status.GetErrorMessage()));
  return absl::OkStatus();
}

std::string EncodeFrame(const tensorpipe::AbstractNopHolder& holder) {
  std::string frame(holder.getSize(), '\0');
  tensorpipe::NopWriter writer(reinterpret_cast<uint8_t*>(frame.data()), frame.size());
  (void)holder.write(writer);
  return frame;
}

absl::StatusOr<DevicePairs> CheckBrochure(const tensorpipe::Brochure& brochure,
                                          const ChannelTable& channels) {
  auto transport = brochure.transportDomainDescriptors.find(kTransportName);
  if (transport == brochure.transportDomainDescriptors.end() || transport->second != kTransportDomain) {
    return Bad("a brochure without our transport");
  }
  return PairsOf(channels.Select(brochure.channelDeviceDescriptors));
}

absl::StatusOr<DevicePairs> CheckBrochureAnswer(const tensorpipe::BrochureAnswer& answer,
                                                const ChannelTable& channels) {
  constexpr uint64_t kDescriptorReply = 1;
  if (answer.transport != kTransportName || answer.transportDomainDescriptor != kTransportDomain) {
    return Bad("an answer that names another transport");
  }
  if (answer.transportRegistrationIds.count(kDescriptorReply) == 0)
    return Bad("an answer without a reply connection");
  const ChannelTable::Selection ours = channels.Select(answer.channelDeviceDescriptors);
  if (ours.size() != answer.channelForDevicePair.size())
    return Bad("an answer with other channels than ours");
  for (const auto& [devices, channel] : ours) {
    auto theirs = answer.channelForDevicePair.find(std::make_pair(devices.second, devices.first));
    if (theirs == answer.channelForDevicePair.end() || theirs->second != channel) {
      return Bad("an answer with other channels than ours");
    }
    auto ids = answer.channelRegistrationIds.find(channel);
    if (ids == answer.channelRegistrationIds.end() ||
        ids->second.size() != channels.ConnectionsFor(channel)) {
      return Bad("an answer with too few connections for a channel");
    }
  }
  return PairsOf(ours);
}

absl::Status CheckServerHello(const tensorpipe::channel::mpt::Packet& packet) {
  using ServerHello = tensorpipe::channel::mpt::ServerHello;
  if (!packet.is<ServerHello>()) return Bad("not a hello of mpt");
  if (packet.get<ServerHello>()->laneAdvertisements.size() != kLanes)
    return Bad("a hello of mpt with other lanes");
  return absl::OkStatus();
}

absl::Status CheckDescriptor(const tensorpipe::Descriptor& descriptor, const MessageLimits& limits,
                             const DevicePairs& pairs) {
  if (descriptor.metadata.size() > limits.max_header_bytes) {
    return Bad(absl::StrCat("a header of ", descriptor.metadata.size(), " bytes, above the limit of ",
                            limits.max_header_bytes));
  }
  if (!descriptor.payloads.empty()) return Bad("a message with payloads, which we never send");
  if (descriptor.tensors.size() > limits.max_tensors) {
    return Bad(absl::StrCat(descriptor.tensors.size(), " tensors, above the limit of ", limits.max_tensors));
  }
  for (const tensorpipe::Descriptor::Tensor& tensor : descriptor.tensors) {
    if (tensor.length > limits.max_tensor_bytes) {
      return Bad(absl::StrCat("a tensor of ", tensor.length, " bytes, above the limit of ",
                              limits.max_tensor_bytes));
    }
    if (!tensor.targetDevice.has_value()) return Bad("a tensor without a target");
    absl::StatusOr<Device> source = FromTensorPipe(tensor.sourceDevice);
    absl::StatusOr<Device> target = FromTensorPipe(*tensor.targetDevice);
    if (!source.ok() || !target.ok() || !pairs.Has(*target, *source)) {
      return Bad(absl::StrCat("no channel from ", tensor.sourceDevice.toString(), " to ",
                              tensor.targetDevice->toString()));
    }
  }
  return absl::OkStatus();
}

}  // namespace Atoll::transport
