// Bounded encoding of plain values: little-endian fixed-width integers, and length-prefixed strings.
// A reader never reads beyond its bytes: the first violation latches, every later read gives zero,
// and `status()` names the place. So a decoder reads straight on and checks once at its end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace Atoll::base {

class ByteWriter {
 public:
  ByteWriter() = default;
  /// Appends to `prefix`.
  explicit ByteWriter(std::string prefix) : bytes_(std::move(prefix)) {}

  template <class T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  /// Length (uint32) and bytes. Requires: under 4 GiB.
  void PutString(absl::string_view text) {
    Put<uint32_t>(static_cast<uint32_t>(text.size()));
    bytes_.append(text.data(), text.size());
  }
  /// Bytes without a length.
  void PutRaw(absl::string_view text) { bytes_.append(text.data(), text.size()); }
  size_t size() const { return bytes_.size(); }
  std::string Take() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  /// Reads `bytes`, which must outlive the reader and the views it gives out.
  explicit ByteReader(absl::string_view bytes) : bytes_(bytes) {}

  template <class T>
  T Get() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T value{};
    if (!Need(sizeof(T))) return value;
    if constexpr (std::is_same_v<T, bool>) {
      uint8_t byte = static_cast<uint8_t>(bytes_[at_++]);
      if (byte > 1) Fail("a bool that is neither 0 nor 1");
      return ok() && byte == 1;
    } else {
      std::memcpy(&value, bytes_.data() + at_, sizeof(T));
      at_ += sizeof(T);
      return value;
    }
  }
  /// A string of at most `max_bytes`. The view is into the reader's bytes.
  absl::string_view GetString(size_t max_bytes) {
    uint32_t size = Get<uint32_t>();
    if (size > max_bytes) Fail("a string above its limit");
    return GetRaw(size);
  }
  absl::string_view GetRaw(size_t size) {
    if (!Need(size)) return {};
    absl::string_view view = bytes_.substr(at_, size);
    at_ += size;
    return view;
  }
  /// A count of elements of at least `element_bytes` bytes each: refused when the bytes left could
  /// not hold it, so that a hostile count allocates nothing.
  uint32_t GetCount(size_t element_bytes) {
    uint32_t count = Get<uint32_t>();
    if (static_cast<uint64_t>(count) * element_bytes > remaining()) Fail("a count above the bytes left");
    return ok() ? count : 0;
  }
  size_t remaining() const { return bytes_.size() - at_; }
  size_t position() const { return at_; }
  bool ok() const { return error_ == nullptr; }
  /// Latches an error found by the caller (a bad enum value, say). `what` must be a literal.
  void Fail(const char* what) {
    if (error_ == nullptr) {
      error_ = what;
      error_at_ = at_;
    }
    at_ = bytes_.size();
  }
  /// OK, or InvalidArgument with the first violation and its offset.
  absl::Status status() const;
  /// status(), and an error if bytes are left over.
  absl::Status Finish();

 private:
  bool Need(size_t size) {
    if (size <= remaining() && ok()) return true;
    Fail("bytes end too early");
    return false;
  }

  absl::string_view bytes_;
  size_t at_ = 0;
  const char* error_ = nullptr;
  size_t error_at_ = 0;
};

}  // namespace Atoll::base
