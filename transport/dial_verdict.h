// What the failures of a peer's addresses, taken together, say about the peer. Pure; any thread.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport {

/// From where an address means the same, in rising order: a Unix name on one host, a loopback address on
/// whichever host uses it. A peer on another host is not where they lead.
enum class Reach { kHost, kLoopback, kEverywhere };
Reach ReachOf(const SocketAddress& address);

struct DialFailure {
  std::optional<Reach> reach;  ///< None: it could not even be tried.
  absl::Status status;
};

/// The status of a connect that failed, with `text` before what each address said. Only the addresses of
/// the farthest reach decide: `farthest` is that of all that were to be tried, none if there was none.
/// `late`: the limit ended it. The code is
///   Unauthenticated, FailedPrecondition if one of them says so;
///   NotFound if each says that nobody listens or another does, and one the latter;
///   Unavailable, IsRefused if each says that nobody listens;
///   DeadlineExceeded if late, or else Unavailable: the peer may be alive.
absl::Status DialVerdict(absl::string_view text, const std::vector<DialFailure>& failures,
                         std::optional<Reach> farthest, bool late);

}  // namespace Atoll::transport
