// How a worker comes into a model's job: the shards, the roster, the first values.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "atoll/client/exchange.h"
#include "atoll/client/shard_set.h"
#include "atoll/shard_optim/messages.h"

namespace Atoll::client {

/// Registers this worker with all owners; the answers, by owner.
absl::StatusOr<std::vector<shard_optim::Attach::Reply>> Register(const ShardSet& shards, int worker,
                                                                 absl::Duration limit);

/// Makes sure that the worker is in the roster on all owners from one step on; returns that step.
absl::StatusOr<int64_t> JoinRoster(const ShardSet& shards,
                                   const std::vector<shard_optim::Attach::Reply>& registered,
                                   absl::Duration limit);

/// Sends every chunk's present value to its owner.
absl::Status LoadAll(const std::shared_ptr<Exchange>& exchange, absl::Duration limit);

/// Receives every chunk, of step `min_step` at least; returns the step of the oldest.
absl::StatusOr<int64_t> PullAll(const std::shared_ptr<Exchange>& exchange, int64_t min_step,
                                absl::Duration limit);

}  // namespace Atoll::client
