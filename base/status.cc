#include "atoll/base/status.h"

#include <cstring>

#include "atoll/base/text.h"

namespace Atoll::base {
namespace {

absl::StatusCode CodeOfErrno(int error_number) {
  switch (error_number) {
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case ENETUNREACH:
    case EHOSTUNREACH:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::ErrnoToStatusCode(error_number);
  }
}

}  // namespace

absl::string_view RanName(Ran ran) {
  switch (ran) {
    case Ran::kNo:
      return "no";
    case Ran::kMaybe:
      return "maybe";
    case Ran::kYes:
      return "yes";
  }
  return "maybe";
}

absl::Status WithRan(absl::Status status, Ran ran) {
  if (!status.ok()) status.SetPayload(kRanUrl, absl::Cord(RanName(ran)));
  return status;
}

Ran GetRan(const absl::Status& status) {
  auto payload = status.GetPayload(kRanUrl);
  if (!payload.has_value()) return Ran::kMaybe;
  if (*payload == RanName(Ran::kNo)) return Ran::kNo;
  if (*payload == RanName(Ran::kYes)) return Ran::kYes;
  return Ran::kMaybe;
}

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { annotated.SetPayload(url, payload); });
  return annotated;
}

absl::Status ErrnoStatus(int error_number, absl::string_view what) {
  char buffer[128];
  // The GNU form of strerror_r returns the text, which need not be in the buffer.
  const char* text = strerror_r(error_number, buffer, sizeof(buffer));
  return absl::Status(CodeOfErrno(error_number), absl::StrCat(what, ": ", text));
}

}  // namespace Atoll::base
