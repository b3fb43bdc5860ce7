#include "atoll/transport/dial_verdict.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/transport/refusal.h"

namespace Atoll::transport {

Reach ReachOf(const SocketAddress& address) {
  if (address.family() == AF_UNIX) return Reach::kHost;
  return IsLoopback(address) ? Reach::kLoopback : Reach::kEverywhere;
}

absl::Status DialVerdict(absl::string_view text, const std::vector<DialFailure>& failures,
                         std::optional<Reach> farthest, bool late) {
  int deciding = 0, refused = 0, another = 0;
  bool wrong_key = false, wrong_build = false;
  for (const DialFailure& failure : failures) {
    if (!failure.reach.has_value() || failure.reach != farthest) continue;
    ++deciding;
    refused += IsRefused(failure.status);
    another += absl::IsNotFound(failure.status);
    wrong_key |= absl::IsUnauthenticated(failure.status);
    wrong_build |= absl::IsFailedPrecondition(failure.status);
  }
  const std::string message = absl::StrCat(
      text, ": ", absl::StrJoin(failures, "; ", [](std::string* out, const DialFailure& failure) {
        absl::StrAppend(out, failure.status.message());
      }));
  if (wrong_key) return absl::UnauthenticatedError(message);
  if (wrong_build) return absl::FailedPreconditionError(message);
  const bool gone = !late && deciding > 0 && refused + another == deciding;
  if (gone && another > 0) return absl::NotFoundError(message);
  if (gone) return RefusedError(message);
  return late ? absl::DeadlineExceededError(message) : absl::UnavailableError(message);
}

}  // namespace Atoll::transport
