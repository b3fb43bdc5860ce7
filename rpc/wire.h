// The header of each message on a pipe. What is in it is decided here alone; docs/wire.md tells it in words.
//
//   prefix (48 bytes, fixed places, so that acknowledgements and numbers are filled in when it is sent)
//     0 kind u8 | 1 what u8 | 2 flags u8 | 3 zero u8 | 4 zero u32
//     8 acknowledged on control u64 | 16 acknowledged on bulk u64
//    24 number u64 | 32 call u64 | 40 lowest awaited call u64
//   hello    version u32 | attempt u64 | accepted u64 | limits (header bytes u64, tensors u64, tensor bytes u64)
//            | addresses (count u32, strings)
//            | device map (count u32, each: the sender's index i8 | the receiver's i8; -1 is the CPU)
//   request  timeout in ns i64 (0: none) | method string | version u32 | metadata | body string | tensors
//   reply    code u32 | ran u8 | message string | metadata | body string | tensors
//   bundle   count u32, each: a whole header of data without tensors of its own, as a string
//   metadata count u32, each: key string | value string
//   tensors  count u32, each: dtype u8 | inline u8 | device i8 | dims u8 | sizes i64... | bytes, if inline
//            (device: the receiver's, where it lands: a GPU's index, or -1 for the CPU)
//
// Integers are little-endian, strings a u32 length and bytes. Bytes come from an authenticated peer and are
// still never trusted: a decoder returns an error.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "atoll/base/status.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

inline constexpr uint32_t kWireVersion = 4;
inline constexpr size_t kPrefixBytes = 48;
inline constexpr size_t kMaxMethodName = 128;
inline constexpr size_t kMaxDims = 64;
inline constexpr size_t kMaxDeviceMap = 129;  ///< 128 GPUs and the CPU.
inline constexpr size_t kMaxAddressBytes = 512;
inline constexpr size_t kMaxMetadata = 64;             ///< Entries.
inline constexpr size_t kMaxMetadataKeyBytes = 64;     ///< Of a key.
inline constexpr size_t kMaxMetadataBytes = 16 << 10;  ///< Of all keys and values.
inline constexpr size_t kMaxErrorBytes = 64 << 10;     ///< Of an error's text: longer ones are cut.
/// Every receiver takes a header of this: a hello, an error with its text, a bundle.
inline constexpr size_t kMinHeaderLimit = 128 << 10;
/// Of a bundle that we send.
inline constexpr size_t kMaxBundleBytes = 64 << 10;

/// Numbers are never reused.
enum class Kind : uint8_t { kHello = 1, kAck = 2, kData = 3, kBye = 4, kBundle = 5 };
enum class What : uint8_t { kNothing = 0, kRequest = 1, kReply = 2, kCancel = 3 };
inline constexpr uint8_t kFlagAckNow = 1;  ///< Somebody waits for the acknowledgement.
inline constexpr uint8_t kFlagOneWay = 2;  ///< A request whose reply is dropped.
inline constexpr uint8_t kFlagOpenBulk =
    4;  ///< Of an acknowledgement: open the bulk lane, its sender cannot.

/// The last number received on each lane (index: transport::Lane).
using Acks = std::array<uint64_t, 2>;

struct Prefix {
  Kind kind = Kind::kData;
  What what = What::kNothing;
  uint8_t flags = 0;
  Acks acks = {0, 0};
  uint64_t number = 0;
  uint64_t call = 0;
  uint64_t watermark = 0;
};

/// The first message on each pipe, from both sides.
struct Hello {
  uint64_t attempt = 0;   ///< Number of the pipe among those the connecting side opened on this lane.
  uint64_t accepted = 0;  ///< The highest attempt of the other side that this side accepted.
  std::vector<std::string> addresses;  ///< Where this side can be reached.
  /// Of requests from this side to the other (AgentOptions::device_maps).
  std::map<int, int> device_map = {};
  transport::MessageLimits limits = {};  ///< What this side takes at most.
};

/// A tensor's place in a header that is written: `data` null means that its bytes travel on their own.
struct TensorOut {
  TensorMeta meta;
  const void* data = nullptr;
};

/// A tensor's place in a header that was read.
struct TensorIn {
  TensorMeta meta;
  bool is_inline = false;
  absl::string_view bytes;  ///< If inline.
};

/// A header that was read. Views are into the bytes given to Decode.
struct Header {
  Prefix prefix;
  Hello hello;                                        // kHello.
  std::vector<absl::string_view> parts;               // kBundle.
  absl::Duration timeout = absl::InfiniteDuration();  // kRequest from here.
  absl::string_view method;
  uint32_t version = 0;
  absl::StatusCode code = absl::StatusCode::kOk;  // kReply from here.
  base::Ran ran = base::Ran::kYes;
  absl::string_view message;
  std::vector<std::pair<absl::string_view, absl::string_view>> metadata;  // Both, from here.
  absl::string_view body;
  std::vector<TensorIn> tensors;
};

std::string EncodeHello(const Hello& hello);
std::string EncodeRequest(const MethodId& method, absl::Duration timeout, bool one_way,
                          const Metadata& metadata, absl::string_view body,
                          absl::Span<const TensorOut> tensors);
std::string EncodeReply(const Metadata& metadata, absl::string_view body,
                        absl::Span<const TensorOut> tensors);
std::string EncodeErrorReply(const absl::Status& error, base::Ran ran);
/// A header of a prefix alone: an acknowledgement, a farewell, a cancellation, a number that carries nothing.
std::string EncodeBare(Kind kind, What what, uint64_t call = 0, uint8_t flags = 0);

/// What an encoded header is, and the call that it names.
What WhatOf(absl::string_view header);
uint64_t CallOf(absl::string_view header);

/// Fills the places of an encoded header that are known only when it is sent.
void SetAcks(char* header, const Acks& acks);
void SetNumber(char* header, uint64_t number, bool ack_now);
void SetCall(char* header, uint64_t call, uint64_t watermark);
/// Of a request: how much time is left, so that what waited to be sent gets no more than it had.
void SetTimeout(char* header, absl::Duration timeout);

/// Several headers as one message: what passes through the layers below once passes for all of them.
class BundleWriter {
 public:
  /// Adds `header`; its copy, until the next Add.
  char* Add(absl::string_view header);
  std::string Take() &&;  ///< Of at least one.

 private:
  std::string bytes_;
  uint32_t count_ = 0;
};

/// Reads a header; `tensor_bytes` are the sizes that the pipe announced with it, which must be those of
/// the tensors that are not inline, in order. InvalidArgument says what is wrong.
absl::StatusOr<Header> Decode(absl::string_view bytes, absl::Span<const size_t> tensor_bytes);

/// InvalidArgument for metadata above the limits, or with an odd key.
absl::Status CheckMetadata(const Metadata& metadata);
Metadata ToMetadata(const Header& header);

/// "shard.push v1".
std::string MethodText(absl::string_view name, uint32_t version);
/// At most 128 bytes of [a-z0-9_.], not empty.
bool ValidMethodName(absl::string_view name);

}  // namespace Atoll::rpc
