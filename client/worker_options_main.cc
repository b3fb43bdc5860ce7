// From flags to options. Apart from the flags themselves: atoll-run links only those, and not LibTorch.
#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "atoll/base/status.h"
#include "atoll/client/worker_flags_main.h"

ABSL_DECLARE_FLAG(std::string, model);
ABSL_DECLARE_FLAG(std::string, data);
ABSL_DECLARE_FLAG(int, epochs);
ABSL_DECLARE_FLAG(int, batch);
ABSL_DECLARE_FLAG(int, accumulate);
ABSL_DECLARE_FLAG(int, max_steps);
ABSL_DECLARE_FLAG(std::string, optimizer);
ABSL_DECLARE_FLAG(double, lr);
ABSL_DECLARE_FLAG(std::string, lr_decay);
ABSL_DECLARE_FLAG(double, beta1);
ABSL_DECLARE_FLAG(double, beta2);
ABSL_DECLARE_FLAG(double, eps);
ABSL_DECLARE_FLAG(double, weight_decay);
ABSL_DECLARE_FLAG(std::string, policy);
ABSL_DECLARE_FLAG(absl::Duration, round_limit);
ABSL_DECLARE_FLAG(absl::Duration, attach_limit);
ABSL_DECLARE_FLAG(uint64_t, seed);
ABSL_DECLARE_FLAG(int, threads);
ABSL_DECLARE_FLAG(bool, evaluate);
ABSL_DECLARE_FLAG(std::string, progress);
ABSL_DECLARE_FLAG(std::string, summary);

namespace Atoll::client {

absl::StatusOr<WorkerFlags> WorkerFlagsFromFlags() {
  WorkerFlags flags;
  flags.model = absl::GetFlag(FLAGS_model);
  flags.data = absl::GetFlag(FLAGS_data);
  flags.progress = absl::GetFlag(FLAGS_progress);
  flags.summary = absl::GetFlag(FLAGS_summary);
  flags.threads = absl::GetFlag(FLAGS_threads);
  if (flags.threads < 1 || flags.threads > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("--threads=", flags.threads, ": it should be from 1 to 1024"));
  }
  if (const std::string optimizer = absl::GetFlag(FLAGS_optimizer); optimizer != "adam") {
    return absl::InvalidArgumentError(
        absl::StrCat("--optimizer: there is no optimizer '", optimizer, "': known is adam"));
  }
  WorkerOptions& options = flags.options;
  options.epochs = absl::GetFlag(FLAGS_epochs);
  options.batch = absl::GetFlag(FLAGS_batch);
  options.accumulate = absl::GetFlag(FLAGS_accumulate);
  options.max_steps = absl::GetFlag(FLAGS_max_steps);
  options.adam = {.lr = absl::GetFlag(FLAGS_lr),
                  .beta1 = absl::GetFlag(FLAGS_beta1),
                  .beta2 = absl::GetFlag(FLAGS_beta2),
                  .eps = absl::GetFlag(FLAGS_eps),
                  .weight_decay = absl::GetFlag(FLAGS_weight_decay)};
  const std::string decay = absl::GetFlag(FLAGS_lr_decay);
  if (decay != "none" && decay != "linear") {
    return absl::InvalidArgumentError(absl::StrCat("--lr_decay=", decay, ": it should be none or linear"));
  }
  options.decay = decay == "linear" ? LearningRateDecay::kLinear : LearningRateDecay::kNone;
  const std::string policy = absl::GetFlag(FLAGS_policy);
  if (policy == "sync") {
    options.policy = shard_optim::Sync{absl::GetFlag(FLAGS_round_limit)};
  } else if (policy == "async") {
    options.policy = shard_optim::Async{};
  } else {
    return absl::InvalidArgumentError(absl::StrCat("--policy=", policy, ": it should be sync or async"));
  }
  options.attach_limit = absl::GetFlag(FLAGS_attach_limit);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.evaluate = absl::GetFlag(FLAGS_evaluate);
  // The options and their flags have the same names, and the errors start with them.
  const absl::Status valid = Validate(options);
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", absl::StripPrefix(valid.message(), "Adam's ")));
  }
  return flags;
}

}  // namespace Atoll::client
