#include "atoll/shard_optim/options.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace Atoll::shard_optim {
namespace {

constexpr absl::Duration kLongestRound = absl::Hours(365 * 24);

}  // namespace

absl::Status Validate(const AdamOptions& options) {
  auto error = [](const char* name, double value, const char* range) {
    return absl::InvalidArgumentError(absl::StrCat("Adam's ", name, " is ", value, ": expected ", range));
  };
  // Written so that NaN is refused.
  if (!(options.lr >= 0) || !std::isfinite(options.lr))
    return error("lr", options.lr, "at least 0 and finite");
  if (!(options.beta1 >= 0 && options.beta1 < 1)) return error("beta1", options.beta1, "0 <= beta1 < 1");
  if (!(options.beta2 >= 0 && options.beta2 < 1)) return error("beta2", options.beta2, "0 <= beta2 < 1");
  if (!(options.eps >= 0) || !std::isfinite(options.eps)) {
    return error("eps", options.eps, "at least 0 and finite");
  }
  if (!(options.weight_decay >= 0) || !std::isfinite(options.weight_decay)) {
    return error("weight_decay", options.weight_decay, "at least 0 and finite");
  }
  return absl::OkStatus();
}

absl::Status Validate(const Policy& policy) {
  const auto* sync = std::get_if<Sync>(&policy);
  if (sync == nullptr) return absl::OkStatus();
  // It travels in milliseconds.
  if (sync->round_limit >= absl::Milliseconds(1) && sync->round_limit <= kLongestRound)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("round_limit is ", absl::FormatDuration(sync->round_limit),
                                                 ": expected 1ms to ", absl::FormatDuration(kLongestRound)));
}

}  // namespace Atoll::shard_optim
