#include "atoll/rpc/wire.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include <c10/core/ScalarType.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/bytes.h"
#include "atoll/base/log.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::rpc {
namespace {

constexpr size_t kWhatAt = 1;
constexpr size_t kFlagsAt = 2;
constexpr size_t kAcksAt = 8;
constexpr size_t kNumberAt = 24;
constexpr size_t kCallAt = 32;
constexpr size_t kWatermarkAt = 40;
constexpr size_t kTimeoutAt = kPrefixBytes;  // Of a request.
constexpr size_t kMinTensorBytes = 4;

// A timeout beyond an int64 of nanoseconds (292 years) is none.
int64_t TimeoutField(absl::Duration timeout) {
  const int64_t ns = absl::ToInt64Nanoseconds(timeout);
  return ns == std::numeric_limits<int64_t>::max() ? 0 : std::max<int64_t>(ns, 1);
}

void PutPrefix(base::ByteWriter& out, Kind kind, What what, uint8_t flags, uint64_t call = 0) {
  out.Put(kind);
  out.Put(what);
  out.Put(flags);
  out.Put<uint8_t>(0);
  out.Put<uint32_t>(0);
  for (int i = 0; i < 3; ++i) out.Put<uint64_t>(0);
  out.Put(call);
  out.Put<uint64_t>(0);
}

void PutTensors(base::ByteWriter& out, absl::Span<const TensorOut> tensors) {
  out.Put(static_cast<uint32_t>(tensors.size()));
  for (const TensorOut& tensor : tensors) {
    out.Put(static_cast<uint8_t>(tensor.meta.dtype));
    out.Put(tensor.data != nullptr);
    out.Put(static_cast<int8_t>(tensor.meta.device.is_cpu() ? kCpuIndex : tensor.meta.device.index()));
    out.Put(static_cast<uint8_t>(tensor.meta.sizes.size()));
    for (int64_t size : tensor.meta.sizes) out.Put(size);
    if (tensor.data != nullptr) {
      out.PutRaw(absl::string_view(static_cast<const char*>(tensor.data), tensor.meta.bytes()));
    }
  }
}

bool ValidMetadataKey(absl::string_view key) {
  return key.size() <= kMaxMetadataKeyBytes && ValidMethodName(key);
}

// Every dtype that is a plain array of elements; quantized and bit types travel by nobody.
bool KnownDtype(uint8_t dtype) {
  using at::ScalarType;
  if (dtype >= static_cast<uint8_t>(ScalarType::NumOptions)) return false;
  ScalarType type = static_cast<ScalarType>(dtype);
  return c10::isFloatingType(type) || c10::isIntegralType(type, /*includeBool=*/true) ||
         c10::isComplexType(type);
}

TensorIn GetTensor(base::ByteReader& in) {
  TensorIn tensor;
  uint8_t dtype = in.Get<uint8_t>();
  if (in.ok() && !KnownDtype(dtype)) in.Fail("an unknown dtype");
  tensor.is_inline = in.Get<bool>();
  const int8_t device = in.Get<int8_t>();
  if (device < kCpuIndex) in.Fail("an unknown device");
  size_t dims = in.Get<uint8_t>();
  if (dims > kMaxDims) in.Fail("too many dimensions");
  if (dims * sizeof(int64_t) > in.remaining()) in.Fail("sizes above the bytes left");
  if (!in.ok()) return tensor;
  tensor.meta.dtype = static_cast<at::ScalarType>(dtype);
  if (device != kCpuIndex) tensor.meta.device = c10::Device(c10::kCUDA, device);
  // Each product of a prefix of the sizes must fit, so that nobody overflows in between.
  uint64_t bytes = c10::elementSize(tensor.meta.dtype);
  bool empty = false;
  tensor.meta.sizes.reserve(dims);
  for (size_t i = 0; i < dims; ++i) {
    int64_t size = in.Get<int64_t>();
    if (size < 0) in.Fail("a negative size");
    if (!in.ok()) return tensor;
    empty = empty || size == 0;
    if (size > 1 && bytes > (uint64_t{1} << 62) / static_cast<uint64_t>(size)) in.Fail("sizes too large");
    if (!in.ok()) return tensor;
    bytes *= static_cast<uint64_t>(std::max<int64_t>(size, 1));
    tensor.meta.sizes.push_back(size);
  }
  if (tensor.is_inline && !empty && device != kCpuIndex) in.Fail("bytes for a GPU in the header");
  if (tensor.is_inline) tensor.bytes = in.GetRaw(empty ? 0 : bytes);
  return tensor;
}

void GetTensors(base::ByteReader& in, absl::Span<const size_t> tensor_bytes, Header& header) {
  uint32_t count = in.GetCount(kMinTensorBytes);
  header.tensors.reserve(count);
  size_t next = 0;
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    header.tensors.push_back(GetTensor(in));
    const TensorIn& tensor = header.tensors.back();
    if (!in.ok() || tensor.is_inline) continue;
    if (next == tensor_bytes.size() || tensor_bytes[next] != tensor.meta.bytes()) {
      in.Fail("a tensor that is not as the pipe announced it");
    }
    ++next;
  }
  if (in.ok() && next != tensor_bytes.size()) in.Fail("fewer tensors than the pipe announced");
}

void PutMetadata(base::ByteWriter& out, const Metadata& metadata) {
  out.Put(static_cast<uint32_t>(metadata.size()));
  for (const auto& [key, value] : metadata) {
    out.PutString(key);
    out.PutString(value);
  }
}

void GetMetadata(base::ByteReader& in, Header& header) {
  const uint32_t count = in.GetCount(2 * sizeof(uint32_t));
  if (count > kMaxMetadata) in.Fail("too much metadata");
  size_t bytes = 0;
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const absl::string_view key = in.GetString(kMaxMetadataKeyBytes);
    if (in.ok() && !ValidMetadataKey(key)) in.Fail("metadata with an odd key");
    if (in.ok() && !header.metadata.empty() && header.metadata.back().first >= key) {
      in.Fail("metadata that is not in the order of its keys");
    }
    const absl::string_view value = in.GetString(kMaxMetadataBytes);
    bytes += key.size() + value.size();
    if (bytes > kMaxMetadataBytes) in.Fail("too much metadata");
    header.metadata.emplace_back(key, value);
  }
}

void GetHello(base::ByteReader& in, Hello& hello) {
  uint32_t version = in.Get<uint32_t>();
  if (in.ok() && version != kWireVersion) in.Fail("another version of the wire");
  hello.attempt = in.Get<uint64_t>();
  hello.accepted = in.Get<uint64_t>();
  hello.limits.max_header_bytes = in.Get<uint64_t>();
  hello.limits.max_tensors = in.Get<uint64_t>();
  hello.limits.max_tensor_bytes = in.Get<uint64_t>();
  if (in.ok() && hello.limits.max_header_bytes < kMinHeaderLimit) in.Fail("a header's limit that is too low");
  uint32_t count = in.GetCount(sizeof(uint32_t));
  if (count > transport::kMaxAddresses) in.Fail("too many addresses");
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    hello.addresses.emplace_back(in.GetString(kMaxAddressBytes));
  }
  count = in.GetCount(2);
  if (count > kMaxDeviceMap) in.Fail("too many devices");
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const int from = in.Get<int8_t>();
    const int to = in.Get<int8_t>();
    if (from < kCpuIndex || to < kCpuIndex || !hello.device_map.emplace(from, to).second) {
      in.Fail("an odd device map");
    }
  }
}

void GetRequest(base::ByteReader& in, absl::Span<const size_t> tensor_bytes, Header& header) {
  int64_t timeout = in.Get<int64_t>();
  if (timeout < 0) in.Fail("a negative timeout");
  header.timeout = timeout == 0 ? absl::InfiniteDuration() : absl::Nanoseconds(timeout);
  header.method = in.GetString(kMaxMethodName);
  if (in.ok() && !ValidMethodName(header.method)) in.Fail("a method's name with odd characters");
  header.version = in.Get<uint32_t>();
  GetMetadata(in, header);
  header.body = in.GetString(std::numeric_limits<uint32_t>::max());
  GetTensors(in, tensor_bytes, header);
}

void GetReply(base::ByteReader& in, absl::Span<const size_t> tensor_bytes, Header& header) {
  uint32_t code = in.Get<uint32_t>();
  if (code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) in.Fail("an unknown status code");
  uint8_t ran = in.Get<uint8_t>();
  if (ran > static_cast<uint8_t>(base::Ran::kYes)) in.Fail("an unknown kind of ran");
  header.code = static_cast<absl::StatusCode>(code);
  header.ran = static_cast<base::Ran>(ran);
  header.message = in.GetString(kMaxErrorBytes);
  GetMetadata(in, header);
  header.body = in.GetString(std::numeric_limits<uint32_t>::max());
  GetTensors(in, tensor_bytes, header);
}

void GetBundle(base::ByteReader& in, Header& header) {
  const uint32_t count = in.GetCount(sizeof(uint32_t) + kPrefixBytes);
  if (count == 0) in.Fail("an empty bundle");
  header.parts.reserve(count);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    const absl::string_view part = in.GetString(std::numeric_limits<uint32_t>::max());
    if (in.ok() && (part.empty() || part[0] != static_cast<char>(Kind::kData))) {
      in.Fail("something else than data in a bundle");
    }
    header.parts.push_back(part);
  }
}

}  // namespace

std::string EncodeHello(const Hello& hello) {
  base::ByteWriter out;
  PutPrefix(out, Kind::kHello, What::kNothing, 0);
  out.Put(kWireVersion);
  out.Put(hello.attempt);
  out.Put(hello.accepted);
  out.Put<uint64_t>(hello.limits.max_header_bytes);
  out.Put<uint64_t>(hello.limits.max_tensors);
  out.Put<uint64_t>(hello.limits.max_tensor_bytes);
  size_t count = std::min(hello.addresses.size(), transport::kMaxAddresses);
  out.Put(static_cast<uint32_t>(count));
  for (size_t i = 0; i < count; ++i) {
    out.PutString(absl::string_view(hello.addresses[i]).substr(0, kMaxAddressBytes));
  }
  out.Put(static_cast<uint32_t>(hello.device_map.size()));
  for (const auto& [from, to] : hello.device_map) {
    out.Put(static_cast<int8_t>(from));
    out.Put(static_cast<int8_t>(to));
  }
  return std::move(out).Take();
}

std::string EncodeRequest(const MethodId& method, absl::Duration timeout, bool one_way,
                          const Metadata& metadata, absl::string_view body,
                          absl::Span<const TensorOut> tensors) {
  size_t bytes = kPrefixBytes + 32 + method.name.size() + body.size();
  for (const auto& [key, value] : metadata) bytes += 8 + key.size() + value.size();
  for (const TensorOut& tensor : tensors) {
    bytes += kMinTensorBytes + 8 * tensor.meta.sizes.size() + (tensor.data ? tensor.meta.bytes() : 0);
  }
  std::string storage;
  storage.reserve(bytes);
  base::ByteWriter out(std::move(storage));
  PutPrefix(out, Kind::kData, What::kRequest, one_way ? kFlagOneWay : 0);
  out.Put<int64_t>(TimeoutField(timeout));
  out.PutString(method.name);
  out.Put(method.version);
  PutMetadata(out, metadata);
  out.PutString(body);
  PutTensors(out, tensors);
  return std::move(out).Take();
}

std::string EncodeReply(const Metadata& metadata, absl::string_view body,
                        absl::Span<const TensorOut> tensors) {
  base::ByteWriter out;
  PutPrefix(out, Kind::kData, What::kReply, 0);
  out.Put<uint32_t>(0);
  out.Put(static_cast<uint8_t>(base::Ran::kYes));
  out.PutString("");
  PutMetadata(out, metadata);
  out.PutString(body);
  PutTensors(out, tensors);
  return std::move(out).Take();
}

std::string EncodeErrorReply(const absl::Status& error, base::Ran ran) {
  base::ByteWriter out;
  PutPrefix(out, Kind::kData, What::kReply, 0);
  uint32_t code = static_cast<uint32_t>(error.code());
  if (code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
    code = static_cast<uint32_t>(absl::StatusCode::kUnknown);
  }
  out.Put(code);
  out.Put(static_cast<uint8_t>(ran));
  out.PutString(error.message().substr(0, kMaxErrorBytes));
  PutMetadata(out, {});
  out.PutString("");
  PutTensors(out, {});
  return std::move(out).Take();
}

std::string EncodeBare(Kind kind, What what, uint64_t call, uint8_t flags) {
  base::ByteWriter out;
  PutPrefix(out, kind, what, flags, call);
  return std::move(out).Take();
}

What WhatOf(absl::string_view header) { return static_cast<What>(header[kWhatAt]); }

uint64_t CallOf(absl::string_view header) {
  uint64_t call = 0;
  std::memcpy(&call, header.data() + kCallAt, sizeof(call));
  return call;
}

void SetAcks(char* header, const Acks& acks) { std::memcpy(header + kAcksAt, acks.data(), sizeof(acks)); }

void SetNumber(char* header, uint64_t number, bool ack_now) {
  std::memcpy(header + kNumberAt, &number, sizeof(number));
  if (ack_now) header[kFlagsAt] = static_cast<char>(header[kFlagsAt] | kFlagAckNow);
}

void SetCall(char* header, uint64_t call, uint64_t watermark) {
  std::memcpy(header + kCallAt, &call, sizeof(call));
  std::memcpy(header + kWatermarkAt, &watermark, sizeof(watermark));
}

void SetTimeout(char* header, absl::Duration timeout) {
  const int64_t field = TimeoutField(timeout);
  std::memcpy(header + kTimeoutAt, &field, sizeof(field));
}

char* BundleWriter::Add(absl::string_view header) {
  if (bytes_.empty()) {
    bytes_ = EncodeBare(Kind::kBundle, What::kNothing);
    bytes_.append(sizeof(count_), 0);
  }
  ++count_;
  const uint32_t size = header.size();
  bytes_.append(reinterpret_cast<const char*>(&size), sizeof(size));
  bytes_.append(header.data(), header.size());
  return bytes_.data() + bytes_.size() - header.size();
}

std::string BundleWriter::Take() && {
  ATOLL_CHECK(count_ > 0);
  std::memcpy(bytes_.data() + kPrefixBytes, &count_, sizeof(count_));
  return std::move(bytes_);
}

absl::StatusOr<Header> Decode(absl::string_view bytes, absl::Span<const size_t> tensor_bytes) {
  base::ByteReader in(bytes);
  Header header;
  Prefix& prefix = header.prefix;
  prefix.kind = in.Get<Kind>();
  prefix.what = in.Get<What>();
  prefix.flags = in.Get<uint8_t>();
  if (in.Get<uint8_t>() != 0 || in.Get<uint32_t>() != 0) in.Fail("reserved bytes that are not zero");
  if (prefix.flags > (kFlagAckNow | kFlagOneWay | kFlagOpenBulk)) in.Fail("unknown flags");
  for (uint64_t& ack : prefix.acks) ack = in.Get<uint64_t>();
  prefix.number = in.Get<uint64_t>();
  prefix.call = in.Get<uint64_t>();
  prefix.watermark = in.Get<uint64_t>();
  bool has_tensors = false;
  if (in.ok()) {
    if (prefix.kind == Kind::kHello) {
      GetHello(in, header.hello);
    } else if (prefix.kind == Kind::kData && prefix.what == What::kRequest) {
      has_tensors = true;
      GetRequest(in, tensor_bytes, header);
    } else if (prefix.kind == Kind::kData && prefix.what == What::kReply) {
      has_tensors = true;
      GetReply(in, tensor_bytes, header);
    } else if (prefix.kind == Kind::kData) {
      if (prefix.what != What::kNothing && prefix.what != What::kCancel) in.Fail("an unknown kind of data");
    } else if (prefix.kind == Kind::kBundle) {
      if (bytes.size() > kMinHeaderLimit) in.Fail("a bundle above its limit");
      if (prefix.what != What::kNothing || prefix.flags != 0 || prefix.acks != Acks{0, 0} ||
          prefix.number != 0 || prefix.call != 0 || prefix.watermark != 0) {
        in.Fail("a bundle's prefix that is not zero");
      }
      GetBundle(in, header);
    } else if (prefix.kind != Kind::kAck && prefix.kind != Kind::kBye) {
      in.Fail("an unknown kind of message");
    }
  }
  if (in.ok() && !has_tensors && !tensor_bytes.empty()) in.Fail("tensors where none belong");
  ATOLL_RETURN_IF_ERROR(in.Finish());
  return header;
}

absl::Status CheckMetadata(const Metadata& metadata) {
  size_t bytes = 0;
  for (const auto& [key, value] : metadata) {
    bytes += key.size() + value.size();
    if (!ValidMetadataKey(key)) {
      return absl::InvalidArgumentError(absl::StrCat("a key of metadata is at most ", kMaxMetadataKeyBytes,
                                                     " bytes of [a-z0-9_.], and this is '",
                                                     absl::CHexEscape(key), "'"));
    }
  }
  if (metadata.size() <= kMaxMetadata && bytes <= kMaxMetadataBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("metadata of ", metadata.size(), " entries, ", bytes,
                                                 " bytes; a message takes ", kMaxMetadata, " and ",
                                                 kMaxMetadataBytes));
}

Metadata ToMetadata(const Header& header) {
  Metadata metadata;
  for (const auto& [key, value] : header.metadata) metadata.emplace_hint(metadata.end(), key, value);
  return metadata;
}

std::string MethodText(absl::string_view name, uint32_t version) { return absl::StrCat(name, " v", version); }

bool ValidMethodName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxMethodName && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
  });
}

}  // namespace Atoll::rpc
