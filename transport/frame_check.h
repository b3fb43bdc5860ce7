// What a peer's frames must look like before TensorPipe acts on them. Its decoder (libnop) reads scalars
// without bounds, and its core throws, or reads beyond a vector, on well-formed messages with wrong
// contents; either would take the process down. So each frame is walked first, then decoded, then its
// meaning is checked. Pure; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "atoll/transport/channel_table.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::transport {

/// The one transport that we register with TensorPipe's core, and its domain.
inline constexpr char kTransportName[] = "atoll";
inline constexpr char kTransportDomain[] = "atoll:1";
/// Connections that the channel mpt opens beside its own.
inline constexpr int kLanes = 2;

/// OK if `frame` is one well-formed libnop value and nothing behind it. A decoder of any type then stays
/// within the frame: it follows the same lengths, or stops at the first prefix that it did not expect.
absl::Status WalkFrame(absl::string_view frame);

/// WalkFrame, then decodes into `holder`; InvalidArgument if either fails.
absl::Status DecodeFrame(absl::string_view frame, tensorpipe::AbstractNopHolder& holder);
std::string EncodeFrame(const tensorpipe::AbstractNopHolder& holder);

/// The checks of meaning, each for what TensorPipe does with the message.
absl::StatusOr<DevicePairs> CheckBrochure(const tensorpipe::Brochure& brochure, const ChannelTable& channels);
absl::StatusOr<DevicePairs> CheckBrochureAnswer(const tensorpipe::BrochureAnswer& answer,
                                                const ChannelTable& channels);
absl::Status CheckServerHello(const tensorpipe::channel::mpt::Packet& packet);
/// Fills nothing in: whether the targets exist here is `pairs`' to say.
absl::Status CheckDescriptor(const tensorpipe::Descriptor& descriptor, const MessageLimits& limits,
                             const DevicePairs& pairs);

}  // namespace Atoll::transport
