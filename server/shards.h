// What this owner's process serves of `shard_optim`.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "atoll/rref/rref.h"

namespace Atoll::server {

/// Registers the class of shards. AlreadyExists if it is.
absl::Status RegisterShards(rref::ObjectSpace& objects);

/// One line a shard: "shard of 'model': 103461 parameters, 827688 bytes of state, 1876 steps".
std::vector<std::string> DescribeShards(rref::ObjectSpace& objects);

}  // namespace Atoll::server
