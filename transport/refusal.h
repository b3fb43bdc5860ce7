// A refused connection: the one failure to connect that says that the peer's process is not there. A status
// carries it as a payload, so that nobody reads it out of a text.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace Atoll::transport {

/// Of Endpoint::Connect's Unavailable: the hosts of all addresses that could be tried say that nobody listens
/// there. Any other failure may pass by itself. Annotations keep it; it does not travel in replies.
bool IsRefused(const absl::Status& status);

/// An Unavailable that IsRefused: for what implements Endpoint, and for who learns as surely that the process is not
/// there (another has its address).
absl::Status RefusedError(absl::string_view message);

}  // namespace Atoll::transport
