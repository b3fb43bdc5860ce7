#include "atoll/transport/refusal.h"

#include "absl/strings/cord.h"

namespace Atoll::transport {
namespace {

constexpr char kRefusedUrl[] = "atoll/refused";

}  // namespace

bool IsRefused(const absl::Status& status) {
  return absl::IsUnavailable(status) && status.GetPayload(kRefusedUrl).has_value();
}

absl::Status RefusedError(absl::string_view message) {
  absl::Status status = absl::UnavailableError(message);
  status.SetPayload(kRefusedUrl, absl::Cord());
  return status;
}

}  // namespace Atoll::transport
