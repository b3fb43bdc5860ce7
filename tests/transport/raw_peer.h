// A peer that has the key and speaks TensorPipe's frames by hand, so that tests can send what TensorPipe
// never would.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/transport/frame_check.h"
#include "atoll/transport/handshake_core.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::transport::testing {

/// The fingerprint of this build, as an endpoint tells it to whoever offers another.
inline std::string Fingerprint(const EndpointOptions& server) {
  static const std::string fingerprint = [&] {
    Member probe(Options("probe"));
    HandshakeConfig config{probe.options().job, {"probe", base::Incarnation(1)}, kKey, "?", kProtocolVersion};
    ClientHandshake handshake(&config, {}, {}, NewNonce());
    RawSocket socket(probe.endpoint().addresses().back());
    EXPECT_FALSE(socket.Greet(handshake));
    // "refused (another build): it has '...', we have '?'"
    const std::string text(handshake.status().message());
    const size_t begin = text.find('\'') + 1;
    return text.substr(begin, text.find('\'', begin) - begin);
  }();
  return fingerprint;
}

/// How to greet an endpoint with `server` options.
inline HandshakeConfig RawConfig(const EndpointOptions& server, const std::string& name) {
  return {
      server.job, {name, base::NewIncarnation()}, server.key.bytes, Fingerprint(server), kProtocolVersion};
}

template <class T>
std::string Encode(T object) {
  tensorpipe::NopHolder<T> holder;
  holder.getObject() = std::move(object);
  return EncodeFrame(holder);
}

inline std::string NewPipePacket() {
  tensorpipe::Packet packet;
  packet.Become(packet.index_of<tensorpipe::SpontaneousConnection>());
  packet.get<tensorpipe::SpontaneousConnection>()->contextName = "link/1";  // Somebody else's, if believed.
  return Encode(std::move(packet));
}

inline std::string JoinPacket(uint64_t id) {
  tensorpipe::Packet packet;
  packet.Become(packet.index_of<tensorpipe::RequestedConnection>());
  packet.get<tensorpipe::RequestedConnection>()->registrationId = id;
  return Encode(std::move(packet));
}

inline std::string LanePacket(uint64_t id) {
  tensorpipe::channel::mpt::Packet packet;
  packet.Become(packet.index_of<tensorpipe::channel::mpt::ClientHello>());
  packet.get<tensorpipe::channel::mpt::ClientHello>()->registrationId = id;
  return Encode(std::move(packet));
}

/// With the channel basic alone.
inline std::string BrochureFrame(const std::string& domain) {
  tensorpipe::Brochure brochure;
  brochure.transportDomainDescriptors[kTransportName] = domain;
  brochure.channelDeviceDescriptors["basic"] = tensorpipe::channel::basic::create()->deviceDescriptors();
  return Encode(std::move(brochure));
}

inline tensorpipe::Descriptor DescriptorOf(const std::vector<size_t>& tensors) {
  tensorpipe::Descriptor descriptor;
  descriptor.metadata = "header";
  for (size_t bytes : tensors) {
    tensorpipe::Descriptor::Tensor tensor;
    tensor.length = bytes;
    tensor.sourceDevice = tensorpipe::Device("cpu", 0);
    tensor.targetDevice = tensorpipe::Device("cpu", 0);
    descriptor.tensors.push_back(tensor);
  }
  return descriptor;
}

class RawPeer {
 public:
  RawPeer(const std::string& address, const EndpointOptions& server)
      : address_(address), config_(RawConfig(server, "raw")), descriptors_(Open({0, 0})) {}

  /// Goes through TensorPipe's set-up of a pipe with the channel basic.
  bool Establish() {
    descriptors_->Send(RawSocket::Frame(NewPipePacket()) + RawSocket::Frame(BrochureFrame(kTransportDomain)));
    tensorpipe::NopHolder<tensorpipe::BrochureAnswer> answer;
    if (!DecodeFrame(descriptors_->ReceiveFrame(), answer).ok()) return false;
    replies_ = Open({0, Purpose::kNoLane});
    replies_->Send(RawSocket::Frame(JoinPacket(answer.getObject().transportRegistrationIds[1])));
    tensors_ = Open({0, Purpose::kNoLane});
    const std::vector<uint64_t>& ids = answer.getObject().channelRegistrationIds["basic"];
    return ids.size() == 1 && tensors_->Send(RawSocket::Frame(JoinPacket(ids[0])));
  }
  /// The connection of descriptors, and the one of the channel.
  RawSocket& descriptors() { return *descriptors_; }
  RawSocket& tensors() { return *tensors_; }

 private:
  std::unique_ptr<RawSocket> Open(Purpose purpose) {
    auto socket = std::make_unique<RawSocket>(address_);
    ClientHandshake handshake(&config_, {}, purpose, NewNonce());
    EXPECT_TRUE(socket->Greet(handshake)) << handshake.status();
    return socket;
  }

  const std::string address_;
  const HandshakeConfig config_;
  std::unique_ptr<RawSocket> descriptors_, replies_, tensors_;
};

}  // namespace Atoll::transport::testing
