// What one exchange (a step's pushes, or a refresh's pulls) has brought, chunk by chunk: when it is over,
// whether it succeeded, and which parameters may hold half a value. Pure: no I/O, no clock, no lock (its
// owner guards it).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/status/status.h"
#include "atoll/shard_optim/layout_core.h"

namespace Atoll::client {

class StepCore {
 public:
  /// `layout` must outlive it.
  explicit StepCore(const shard_optim::Layout* layout);

  /// A new exchange of every chunk. Requires that none is under way (idle()).
  void Begin();
  /// Each chunk is sent once, and then lands or fails once; what comes twice is ignored.
  void Sent(int chunk);
  /// Its new value, of round `step` (0 where chunks count for themselves, in async), is whole in the
  /// parameters. Returns false if it was not expected.
  bool Landed(int chunk, int contributors, int64_t step);
  /// Its value did not come. DataLoss: it may have come in part.
  bool Failed(int chunk, const absl::Status& status);

  /// Sent, and neither landed nor failed.
  int outstanding() const { return sent_ - landed_ - failed_; }
  bool over() const { return begun_ && landed_ + failed_ == static_cast<int>(states_.size()); }
  bool idle() const { return !begun_ || over(); }

  /// Requires over(). Updates what is torn. OK if every chunk landed; else the first error, with how many
  /// chunks failed.
  absl::Status End();
  /// The smallest over the chunks that landed.
  int contributors() const { return contributors_; }
  /// Owners that still owe a chunk, by index.
  std::vector<int> MissingOwners() const;

  /// Parameters that may hold half a value, by index: kept until an exchange brings all their chunks, of one
  /// step. While one is under way (or timed out and not over), also those that it brought in part, or may be
  /// bringing.
  absl::btree_set<int> torn() const;

 private:
  struct Count {  // Of a parameter's chunks.
    int chunks = 0, landed = 0;
    bool sent = false, broken = false;
    int64_t first_step = 0;
    bool mixed = false;  // Present values are of different steps.
  };
  std::vector<Count> CountByParameter() const;

  enum class State : uint8_t {
    kUnsent,
    kSent,
    kLanded,
    kFailed,  // The old value stands.
    kBroken,  // Failed in the middle of the landing.
  };
  const shard_optim::Layout* const layout_;
  std::vector<State> states_;
  std::vector<int64_t> steps_;  // Of the present values; over exchanges.
  bool begun_ = false;
  int sent_ = 0, landed_ = 0, failed_ = 0;
  int contributors_ = 0;
  absl::Status first_error_;
  absl::btree_set<int> torn_;
};

}  // namespace Atoll::client
