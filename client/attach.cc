#include "atoll/client/attach.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "atoll/base/clock.h"
#include "atoll/base/status.h"

namespace Atoll::client {
namespace {

// An attempt fails where a round began between two answers; later ones aim further ahead.
constexpr int kJoinAttempts = 100;
constexpr int kAttemptsAStep = 8;

// The calls' own errors, which know more, come before ours.
constexpr absl::Duration kCallsEndFirst = absl::Seconds(5);

absl::Duration Until(absl::Time deadline) { return std::max(deadline - base::Now(), absl::Milliseconds(1)); }

absl::StatusOr<Exchange::Result> RunAll(const std::shared_ptr<Exchange>& exchange, absl::Time deadline,
                                        const std::function<void(int)>& start) {
  exchange->Begin(deadline);
  for (int chunk = 0; chunk < static_cast<int>(exchange->layout().chunks().size()); ++chunk) start(chunk);
  return exchange->Wait(deadline + kCallsEndFirst);
}

}  // namespace

absl::StatusOr<std::vector<shard_optim::Attach::Reply>> Register(const ShardSet& shards, int worker,
                                                                 absl::Time deadline) {
  std::vector<shard_optim::Attach> requests(shards.count());
  for (int i = 0; i < shards.count(); ++i) {
    requests[i].worker = worker;
    requests[i].arguments = shards.arguments();
    requests[i].arguments.owner = i;
  }
  return shards.CallAll(requests, Until(deadline));
}

absl::StatusOr<int64_t> JoinRoster(const ShardSet& shards,
                                   const std::vector<shard_optim::Attach::Reply>& registered,
                                   absl::Time deadline) {
  int64_t from_step = 1;
  bool at_start = true;
  for (const auto& reply : registered) {
    at_start &= reply.joined && reply.next_step == 1;
    from_step = std::max(from_step, reply.next_step);
  }
  if (at_start) return 1;
  // The owners' rounds go on meanwhile, and all must agree on our first: one that began on any of them moves
  // it on all.
  for (int attempt = 1; attempt <= kJoinAttempts; ++attempt) {
    shard_optim::Join request;
    request.from_step = from_step;
    ATOLL_ASSIGN_OR_RETURN(auto replies, shards.CallAll<shard_optim::Join>({request}, Until(deadline)));
    bool accepted = true;
    for (const auto& reply : replies) {
      accepted &= reply.accepted;
      if (!reply.accepted) from_step = std::max(from_step + 1, reply.next_step + attempt / kAttemptsAStep);
    }
    if (accepted) return request.from_step;
  }
  return absl::AbortedError(
      absl::StrCat("rounds went on faster than this worker could join, up to step ", from_step));
}

absl::Status LoadOrPull(const std::shared_ptr<Exchange>& exchange,
                        const std::vector<shard_optim::Attach::Reply>& registered, int64_t min_step,
                        absl::Time deadline) {
  exchange->StageValues();
  auto result = RunAll(exchange, deadline, [&](int chunk) {
    if (registered[exchange->layout().chunks()[chunk].owner].load) {
      exchange->Load(chunk, min_step);
    } else {
      exchange->Pull(chunk, min_step);
    }
  });
  return base::Annotate(result.status(), "loading the first values");
}

absl::StatusOr<int64_t> PullAll(const std::shared_ptr<Exchange>& exchange, int64_t min_step,
                                absl::Time deadline) {
  auto result = RunAll(exchange, deadline, [&](int chunk) { exchange->Pull(chunk, min_step); });
  if (!result.ok()) return base::Annotate(result.status(), "receiving the owners' values");
  return result->oldest_step;
}

}  // namespace Atoll::client
