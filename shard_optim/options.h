// What a user chooses: the optimizer, and when the owners apply.
#pragma once

#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace Atoll::shard_optim {

/// Adam (Kingma and Ba, arXiv:1412.6980), as torch.optim.Adam(fused=True) computes it.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;       ///< In [0, 1).
  double beta2 = 0.999;     ///< In [0, 1).
  double eps = 1e-8;        ///< At least 0.
  double weight_decay = 0;  ///< L2: added to the gradient. At least 0.
  friend bool operator==(const AdamOptions&, const AdamOptions&) = default;
};
/// InvalidArgument names the value and its range.
absl::Status Validate(const AdamOptions& options);

/// A step is a round: all workers of its roster contribute, the mean is applied once.
struct Sync {
  absl::Duration round_limit = absl::Seconds(60);  ///< Then the round fails and names who is missing.
};
/// Every contribution is applied as it comes, one after another for each slice.
struct Async {};
using Policy = std::variant<Sync, Async>;
/// InvalidArgument: a round_limit out of 1 ms to a year.
absl::Status Validate(const Policy& policy);

}  // namespace Atoll::shard_optim
