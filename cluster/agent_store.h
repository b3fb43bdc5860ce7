// torchrun's side of a launch. Its agent serves a c10d TCPStore at MASTER_ADDR:MASTER_PORT, so the
// coordinator cannot have that port: it binds any other and publishes where. We are only ever a client of
// that store (one of our own would listen on all interfaces, without a key), and what it says is only an
// address: who answers there must still prove the job key.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "atoll/cluster/launch.h"

namespace Atoll::cluster {

/// On the coordinator of a launch with `agent_store`: publishes that it listens at `host` (a name or literal)
/// and `port`. Unavailable (no store there) or DeadlineExceeded within `limit`.
absl::Status PublishCoordinator(const Launch& launch, absl::string_view host, int port,
                                absl::Duration limit = absl::Seconds(20));

/// Elsewhere: waits until it is published and returns it as transport::Endpoint::Connect takes it
/// ("host:port", "[v6]:port"). DeadlineExceeded: nothing was published within `limit`; Unavailable: no store;
/// DataLoss: something else stands there.
absl::StatusOr<std::string> FindCoordinator(const Launch& launch, absl::Duration limit);

/// Tells torchrun why this process fails: it shows `message` in its summary. Does nothing where
/// TORCHELASTIC_ERROR_FILE is not set.
absl::Status WriteTorchElasticError(absl::string_view message,
                                    const Environment& environment = ProcessEnvironment());

}  // namespace Atoll::cluster
