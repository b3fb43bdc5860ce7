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
                                                                 absl::Time deadline);

/// Makes sure that the worker is in the roster on all owners from one step on; returns that step.
absl::StatusOr<int64_t> JoinRoster(const ShardSet& shards,
                                   const std::vector<shard_optim::Attach::Reply>& registered,
                                   absl::Time deadline);

/// Sends the present values to the owners that asked for them (a worker 0 that died while it loaded had begun:
/// not all ask its successor), and receives the other owners' as PullAll does.
absl::Status LoadOrPull(const std::shared_ptr<Exchange>& exchange,
                        const std::vector<shard_optim::Attach::Reply>& registered, int64_t min_step,
                        absl::Time deadline);

/// Receives every chunk, of step `min_step` at least; returns the step of the oldest.
absl::StatusOr<int64_t> PullAll(const std::shared_ptr<Exchange>& exchange, int64_t min_step,
                                absl::Time deadline);

}  // namespace Atoll::client
