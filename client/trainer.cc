#include "atoll/client/trainer.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/clock.h"
#include "atoll/base/fork.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/client/attach.h"
#include "atoll/client/exchange.h"
#include "atoll/client/gradient_hook.h"
#include "atoll/client/parameters.h"

namespace Atoll::client {
namespace {

class TrainerImpl : public Trainer {
 public:
  TrainerImpl(Session& session, TrainerOptions options) : session_(session), options_(std::move(options)) {}
  ~TrainerImpl() override;

  absl::Status Start(const NamedTensors& named);

  absl::StatusOr<StepResult> Step() override;
  AccumulationScope Accumulate() override;
  absl::Status SetLearningRate(double lr) override;
  absl::Status Refresh() override;
  std::vector<std::string> torn() const override {
    return session_.in_child() ? std::vector<std::string>() : exchange_->torn();
  }
  absl::Status Leave() override;
  absl::StatusOr<std::vector<ShardInfo>> Shards() override;

 private:
  enum class Phase {
    kIdle,     // Between steps.
    kPushing,  // Some gradients of the step have been handed over.
    kLanding,  // All of them; new values arrive.
  };

  bool sync() const { return std::holds_alternative<shard_optim::Sync>(options_.policy); }
  absl::Duration round_limit() const {
    const auto* policy = std::get_if<shard_optim::Sync>(&options_.policy);
    return policy != nullptr ? policy->round_limit : options_.async_limit;
  }
  const ParameterSet& parameters() const { return exchange_->parameters(); }
  const shard_optim::Layout& layout() const { return exchange_->layout(); }

  absl::Status InstallHooks(const ParameterSet& parameters);
  void RemoveHooks();
  absl::Status Usable() const;

  void OnGradient(int parameter);
  void KeepGradient(int parameter);
  void CloseScope();
  void ForgetCleared();
  void EndOfBackward();
  void BeginStep();
  void HandOver(int parameter, const at::Tensor& gradient);
  void PushBucket(int bucket, const at::Tensor& direct);
  void Flush();
  absl::Status Complaint();
  absl::Status Resume(absl::Time deadline);

  Session& session_;
  TrainerOptions options_;
  std::shared_ptr<Exchange> exchange_;
  bool claimed_ = false;                                        // The model's name is ours in the session.
  bool registered_ = false;                                     // Owners know us.
  std::vector<at::Tensor> hooked_;                              // Have our hook.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // Watched by callbacks of backward.
  bool left_ = false;
  absl::Status failed_;  // Of the last step, until Refresh.

  // Of backwards in scopes, before the step begins.
  int scopes_ = 0;                  // Open ones.
  int accumulated_ = -1;            // A parameter whose gradient was kept; -1: none.
  bool in_scope_backward_ = false;  // One has not ended.
  bool scope_aborted_ = false;      // One threw.

  // The step under way.
  int64_t step_ = 1;
  Phase phase_ = Phase::kIdle;
  bool in_backward_ = false;  // It was begun by a hook, whose backward has not ended.
  Exchange::Step push_;
  std::vector<bool> handed_over_;    // By parameter.
  std::vector<int> bucket_missing_;  // By bucket: parameters not handed over.
  std::string repeated_;             // A parameter that had a second gradient.
  bool aborted_ = false;             // Backward threw.
  bool partly_accumulated_ = false;  // An earlier one in a scope did.
  absl::Status gradient_error_;      // The first gradient that could not be used.
};

absl::Status TrainerImpl::Start(const NamedTensors& named) {
  ATOLL_RETURN_IF_ERROR(session_.CheckActive());
  const absl::Time deadline = base::Now() + options_.attach_limit;
  ATOLL_RETURN_IF_ERROR(shard_optim::Validate(options_.optimizer));
  ATOLL_RETURN_IF_ERROR(shard_optim::Validate(options_.policy));
  ATOLL_ASSIGN_OR_RETURN(ParameterSet parameters, ParameterSet::Create(named));
  shard_optim::ShardArguments arguments;
  arguments.model = options_.name;
  arguments.worker_count = session_.worker_count();
  arguments.layout.owners = std::max(session_.node().launch().owners, 1);
  arguments.layout.chunk_bytes = options_.chunk_bytes;
  arguments.layout.small_parameter_bytes = options_.small_parameter_bytes;
  arguments.parameters = parameters.specs();
  arguments.policy = options_.policy;
  ATOLL_ASSIGN_OR_RETURN(shard_optim::Layout layout,
                         shard_optim::Layout::Create(arguments.parameters, arguments.layout));
  ATOLL_RETURN_IF_ERROR(session_.ClaimModel(options_.name));
  claimed_ = true;
  ATOLL_RETURN_IF_ERROR(InstallHooks(parameters));
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<ShardSet> shards, ShardSet::Open(session_, arguments, deadline));
  Exchange::Limits limits;
  limits.window_bytes = options_.window_bytes;
  exchange_ = std::make_shared<Exchange>(std::move(layout), std::move(parameters), std::move(shards), limits);
  ATOLL_ASSIGN_OR_RETURN(auto registered, Register(exchange_->shards(), session_.worker_index(), deadline));
  registered_ = true;
  ATOLL_ASSIGN_OR_RETURN(step_, JoinRoster(exchange_->shards(), registered, deadline));
  // Values may have to wait for a round that is under way.
  const absl::Time values_there = std::max(deadline, base::Now() + round_limit()) + options_.answer_margin;
  const absl::Status status = LoadOrPull(exchange_, registered, sync() ? step_ - 1 : 0, values_there);
  exchange_->parameters().BumpVersions();
  return status;
}

absl::Status TrainerImpl::InstallHooks(const ParameterSet& parameters) {
  for (int i = 0; i < parameters.count(); ++i) {
    absl::Status status = InstallGradientHook(parameters.tensor(i), [this, i] { OnGradient(i); });
    if (!status.ok()) return base::Annotate(status, absl::StrCat("parameter '", parameters.name(i), "'"));
    hooked_.push_back(parameters.tensor(i));
  }
  return absl::OkStatus();
}

void TrainerImpl::RemoveHooks() {
  for (const at::Tensor& parameter : hooked_) RemoveGradientHook(parameter);
  hooked_.clear();
}

TrainerImpl::~TrainerImpl() {
  alive_.reset();
  RemoveHooks();
  if (session_.in_child()) {
    base::Abandon(std::move(exchange_));
    return;
  }
  if (claimed_) session_.ReleaseModel(options_.name);
  if (!registered_ || left_ || !session_.active()) return;
  shard_optim::Leave request;
  request.after_step = phase_ == Phase::kLanding ? step_ : step_ - 1;
  auto left = exchange_->shards().CallAll<shard_optim::Leave>({request}, options_.leave_limit);
  if (!left.ok())
    ATOLL_LOG(kWarning) << "leaving the roster of '" << options_.name
                        << "': " << base::ErrorText(left.status());
  if (phase_ == Phase::kPushing) return;  // No landing was opened.
  const absl::Status landed = exchange_->AwaitLandings(base::Now() + options_.answer_margin);
  if (!landed.ok()) {
    ATOLL_LOG(kError) << "values may still land in parameters of '" << options_.name
                      << "', whose trainer is gone: " << base::ErrorText(landed);
  }
}

absl::Status TrainerImpl::Usable() const {
  ATOLL_RETURN_IF_ERROR(session_.CheckActive());
  if (left_) return absl::FailedPreconditionError("this worker has left the training of the model");
  if (failed_.ok()) return absl::OkStatus();
  const std::vector<std::string> torn = exchange_->torn();
  return absl::FailedPreconditionError(absl::StrCat(
      "step ", step_, " failed (", failed_.message(), ")",
      torn.empty() ? ""
                   : absl::StrCat("; parameters that may hold half a value: ", absl::StrJoin(torn, ", ")),
      ". Refresh() receives them whole"));
}

// On the thread of backward.
void TrainerImpl::OnGradient(int parameter) {
  const bool usable = !left_ && failed_.ok() && !session_.in_child();
  if (usable && scopes_ > 0 && phase_ == Phase::kIdle) return KeepGradient(parameter);
  const at::Tensor gradient = TakeGradient(parameters().tensor(parameter));
  if (!usable) return;  // Step says so.
  if (phase_ == Phase::kLanding || (phase_ == Phase::kPushing && (scopes_ > 0 || handed_over_[parameter]))) {
    if (repeated_.empty()) repeated_ = parameters().name(parameter);
    return;
  }
  if (phase_ == Phase::kIdle) {
    BeginStep();
    in_backward_ = true;
    AtEndOfBackward([this, watch = std::weak_ptr<bool>(alive_)] {
      if (!watch.expired()) EndOfBackward();
    });
  }
  HandOver(parameter, gradient);
}

// In a scope: autograd adds the next backward's to it.
void TrainerImpl::KeepGradient(int parameter) {
  accumulated_ = parameter;
  if (in_scope_backward_) return;
  in_scope_backward_ = true;
  AtEndOfBackward([this, watch = std::weak_ptr<bool>(alive_)] {
    if (!watch.expired()) in_scope_backward_ = false;
  });
}

AccumulationScope TrainerImpl::Accumulate() {
  ForgetCleared();
  ++scopes_;
  return AccumulationScope([this, watch = std::weak_ptr<bool>(alive_)] {
    if (!watch.expired()) CloseScope();
  });
}

void TrainerImpl::CloseScope() {
  --scopes_;
  scope_aborted_ |= std::exchange(in_scope_backward_, false);
}

// Where no parameter has a gradient, the user dropped what was kept.
void TrainerImpl::ForgetCleared() {
  for (int i = 0; i < parameters().count(); ++i) {
    if (parameters().tensor(i).grad().defined()) return;
  }
  accumulated_ = -1;
  scope_aborted_ = false;
}

void TrainerImpl::EndOfBackward() {
  if (phase_ != Phase::kPushing || session_.in_child()) return;
  in_backward_ = false;
  Flush();
}

void TrainerImpl::BeginStep() {
  push_.number = step_;
  push_.optimizer = options_.optimizer;
  push_.exact = sync();
  handed_over_.assign(parameters().count(), false);
  bucket_missing_.clear();
  for (const shard_optim::Bucket& bucket : layout().buckets()) {
    bucket_missing_.push_back(static_cast<int>(bucket.parameters.size()));
  }
  repeated_.clear();
  aborted_ = false;
  partly_accumulated_ = std::exchange(scope_aborted_, false);
  accumulated_ = -1;
  gradient_error_ = absl::OkStatus();
  phase_ = Phase::kPushing;
  exchange_->Begin(base::Now() + options_.backward_limit + round_limit() + options_.answer_margin);
}

// A parameter's gradient is final: its bucket leaves when all of it is.
void TrainerImpl::HandOver(int parameter, const at::Tensor& gradient) {
  auto flat = parameters().Flatten(parameter, gradient);
  if (!flat.ok()) {
    gradient_error_.Update(flat.status());
    return;
  }
  handed_over_[parameter] = true;
  const int bucket = layout().bucket_of(parameter);
  if (bucket < 0) return;
  const bool direct = exchange_->staging().direct(layout().buckets()[bucket].first_chunk);
  if (!direct) exchange_->staging().Gather(layout(), parameter, *flat);
  if (--bucket_missing_[bucket] == 0) PushBucket(bucket, direct ? *flat : at::Tensor());
}

void TrainerImpl::PushBucket(int bucket, const at::Tensor& direct) {
  const shard_optim::Bucket& whole = layout().buckets()[bucket];
  for (int i = whole.first_chunk; i < whole.first_chunk + whole.chunk_count; ++i) {
    const shard_optim::Chunk& chunk = layout().chunks()[i];
    std::string defined((chunk.segments.size() + 7) / 8, '\0');
    bool any = false;
    for (size_t s = 0; s < chunk.segments.size(); ++s) {
      if (!handed_over_[chunk.segments[s].parameter]) continue;
      defined[s / 8] = static_cast<char>(defined[s / 8] | (1 << (s % 8)));
      any = true;
    }
    at::Tensor gradient;
    if (any && exchange_->staging().direct(i)) {
      const shard_optim::Segment& segment = chunk.segments.front();
      gradient = direct.narrow(0, segment.begin, segment.size());
    } else if (any) {
      gradient = exchange_->staging().gather(i);
    }
    exchange_->Push(push_, i, std::move(gradient), std::move(defined));
  }
}

// Nothing more comes: buckets that wait for parameters without a gradient leave as they are, and the owners
// may answer.
void TrainerImpl::Flush() {
  for (int i = 0; i < parameters().count(); ++i) {
    if (handed_over_[i] || layout().bucket_of(i) < 0) continue;
    at::Tensor gradient = TakeGradient(parameters().tensor(i));  // Set by hand, not by a backward.
    if (gradient.defined()) HandOver(i, gradient);
  }
  for (size_t bucket = 0; bucket < bucket_missing_.size(); ++bucket) {
    if (bucket_missing_[bucket] > 0) PushBucket(static_cast<int>(bucket), at::Tensor());
  }
  phase_ = Phase::kLanding;
  parameters().BumpVersions();  // From here on values change: a second backward through them is refused.
  exchange_->OpenLanding(step_);
}

absl::Status TrainerImpl::Complaint() {
  if (aborted_) {
    std::vector<std::string> missing;
    for (int i = 0; i < parameters().count(); ++i) {
      if (!handed_over_[i]) missing.push_back(parameters().name(i));
    }
    return absl::AbortedError(
        absl::StrCat("the backward of step ", push_.number,
                     " did not end; without gradients stayed: ", absl::StrJoin(missing, ", ")));
  }
  if (partly_accumulated_) {
    return absl::AbortedError(
        absl::StrCat("a backward in an accumulation scope of step ", push_.number,
                     " did not end: the sums that were applied have only a part of its gradients"));
  }
  if (!repeated_.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", repeated_, "' had a second gradient before step ", push_.number,
                     " was complete: one backward a step, or Accumulate() around all but the last. The first "
                     "one's gradients were applied, the second's were not"));
  }
  ATOLL_RETURN_IF_ERROR(gradient_error_);
  return parameters().CheckInPlace();
}

absl::StatusOr<StepResult> TrainerImpl::Step() {
  ATOLL_RETURN_IF_ERROR(Usable());
  if (scopes_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", step_, ": an accumulation scope is open; Step comes after its end"));
  }
  if (phase_ == Phase::kIdle) {
    ForgetCleared();
    if (accumulated_ >= 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "step ", step_, ": all backwards were in accumulation scopes, and the sums stay in .grad (of '",
          parameters().name(accumulated_), "' for one): the last backward comes after the scope's end"));
    }
    ATOLL_RETURN_IF_ERROR(parameters().CheckInPlace());
    BeginStep();
  }
  if (phase_ == Phase::kPushing) {
    aborted_ = in_backward_;
    in_backward_ = false;
    Flush();
  }
  auto result = exchange_->Wait(base::Now() + round_limit() + options_.answer_margin);
  phase_ = Phase::kIdle;
  parameters().BumpVersions();
  if (!result.ok()) {
    failed_ = result.status();
    return base::Annotate(failed_, absl::StrCat("step ", step_));
  }
  StepResult done;
  done.step = step_++;
  done.contributors = result->contributors;
  done.bytes_sent = result->bytes_sent;
  done.bytes_received = result->bytes_received;
  ATOLL_RETURN_IF_ERROR(Complaint());
  return done;
}

absl::Status TrainerImpl::SetLearningRate(double lr) {
  shard_optim::AdamOptions changed = options_.optimizer;
  changed.lr = lr;
  ATOLL_RETURN_IF_ERROR(shard_optim::Validate(changed));
  options_.optimizer = changed;
  return absl::OkStatus();
}

absl::Status TrainerImpl::Refresh() {
  ATOLL_RETURN_IF_ERROR(session_.CheckActive());
  if (left_) return absl::FailedPreconditionError("this worker has left the training of the model");
  if (phase_ != Phase::kIdle) {
    return absl::FailedPreconditionError(absl::StrCat("step ", step_, " is under way: Step() ends it"));
  }
  ATOLL_RETURN_IF_ERROR(parameters().CheckInPlace());
  const absl::Duration limit = round_limit() + options_.answer_margin;
  ATOLL_RETURN_IF_ERROR(exchange_->Settle(base::Now() + limit));
  const absl::Time deadline = base::Now() + limit;
  if (failed_.ok()) {
    failed_ = PullAll(exchange_, sync() ? step_ - 1 : 0, deadline).status();
  } else {
    failed_ = Resume(deadline);
  }
  parameters().BumpVersions();
  return failed_;
}

// After a failed step: takes part again, in the same step where an owner still waits for it.
absl::Status TrainerImpl::Resume(absl::Time deadline) {
  ATOLL_ASSIGN_OR_RETURN(auto registered, Register(exchange_->shards(), session_.worker_index(), deadline));
  bool in_roster = true;
  int64_t next_step = INT64_MAX;
  for (size_t owner = 0; owner < registered.size(); ++owner) {
    in_roster &= registered[owner].joined;
    // An owner of nothing never counts.
    if (layout().owners()[owner].chunk_count > 0)
      next_step = std::min(next_step, registered[owner].next_step);
  }
  if (!in_roster) {  // We counted as dead.
    ATOLL_ASSIGN_OR_RETURN(step_, JoinRoster(exchange_->shards(), registered, deadline));
    return PullAll(exchange_, sync() ? step_ - 1 : 0, deadline).status();
  }
  ATOLL_ASSIGN_OR_RETURN(int64_t oldest, PullAll(exchange_, 0, deadline));
  // In sync no round is made without us: the step is over where all values are of it. In async an owner that
  // had no push of it yet expects one.
  step_ = sync() ? oldest + 1 : next_step;
  return absl::OkStatus();
}

absl::Status TrainerImpl::Leave() {
  ATOLL_RETURN_IF_ERROR(session_.CheckActive());
  if (left_) return absl::OkStatus();
  if (phase_ != Phase::kIdle) {
    return absl::FailedPreconditionError(absl::StrCat("step ", step_, " is under way: Step() ends it"));
  }
  shard_optim::Leave request;
  request.after_step = step_ - 1;
  auto left = exchange_->shards().CallAll<shard_optim::Leave>({request}, round_limit());
  ATOLL_RETURN_IF_ERROR(left.status());
  left_ = true;
  RemoveHooks();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Trainer::ShardInfo>> TrainerImpl::Shards() {
  ATOLL_RETURN_IF_ERROR(session_.CheckActive());
  ATOLL_ASSIGN_OR_RETURN(
      auto infos, exchange_->shards().CallAll<shard_optim::Info>({shard_optim::Info{}}, round_limit()));
  std::vector<ShardInfo> shards;
  for (size_t i = 0; i < infos.size(); ++i) {
    shards.push_back({exchange_->shards().owner(static_cast<int>(i)), infos[i].elements, infos[i].state_bytes,
                      infos[i].steps});
  }
  return shards;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Attach(Session& session, NamedTensors parameters,
                                                         TrainerOptions options) {
  auto trainer = std::make_unique<TrainerImpl>(session, std::move(options));
  ATOLL_RETURN_IF_ERROR(base::Annotate(trainer->Start(parameters), "attaching the model"));
  return trainer;
}

}  // namespace Atoll::client
