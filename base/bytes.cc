#include "atoll/base/bytes.h"

#include <bit>

#include "absl/strings/str_cat.h"

namespace Atoll::base {

static_assert(std::endian::native == std::endian::little, "the wire is little-endian, unconverted");

absl::Status ByteReader::status() const {
  if (ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("malformed message: ", error_, " (at byte ", error_at_, ")"));
}

absl::Status ByteReader::Finish() {
  if (ok() && remaining() != 0) Fail("bytes left over at the end");
  return status();
}

}  // namespace Atoll::base
