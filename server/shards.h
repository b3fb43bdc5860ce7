// What this owner's process serves of `shard_optim`, for people.
#pragma once

#include <string>
#include <vector>

#include "atoll/rref/rref.h"

namespace Atoll::server {

/// One line a shard: "shard/model: 103461 parameters, 827688 bytes of optimizer state, 1876 steps". Waits for
/// the shards' own queues, at most 5 s each.
std::vector<std::string> DescribeShards(rref::ObjectSpace& objects);

}  // namespace Atoll::server
