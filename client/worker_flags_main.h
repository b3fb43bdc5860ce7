// The flags of atoll-worker. Apart from its main, because atoll-run knows them too: it passes them on.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "atoll/client/worker.h"

namespace Atoll::client {

struct WorkerFlags {
  std::string model;
  std::string data;
  std::string progress;
  std::string summary;
  int threads = 1;
  WorkerOptions options;
};
/// InvalidArgument names the flag and what it should be.
absl::StatusOr<WorkerFlags> WorkerFlagsFromFlags();

}  // namespace Atoll::client
