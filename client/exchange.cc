#include "atoll/client/exchange.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/clock.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"

namespace Atoll::client {
namespace {

absl::Duration Until(absl::Time deadline) { return std::max(deadline - base::Now(), absl::Milliseconds(1)); }

}  // namespace

Exchange::Exchange(shard_optim::Layout layout, ParameterSet parameters, std::unique_ptr<ShardSet> shards,
                   Limits limits)
    : layout_(std::move(layout)),
      parameters_(std::move(parameters)),
      shards_(std::move(shards)),
      staging_(layout_),
      limits_(limits),
      core_(&layout_),
      pending_(layout_.chunks().size()) {}

void Exchange::Begin(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  core_.Begin();
  deadline_ = deadline;
  landing_status_ = absl::OkStatus();
  result_ = Result{};
  result_.oldest_step = INT64_MAX;
}

// DeadlineExceeded without a text: the caller knows more.
template <class Over>
absl::Status Exchange::AwaitLocked(Over over, absl::Time deadline,
                                   const base::ThreadPool::BlockingScope& blocking) {
  if (over()) return absl::OkStatus();
  if (!blocking.ok()) {
    return absl::ResourceExhaustedError("too many threads of this process's pool wait already");
  }
  if (base::AwaitFor(mu_, absl::Condition(&over), deadline - base::Now())) return absl::OkStatus();
  return absl::DeadlineExceededError("");
}

// In rounds all chunks have the same steps; in async each counts its own contributions.
bool Exchange::in_rounds() const {
  return std::holds_alternative<shard_optim::Sync>(shards_->arguments().policy);
}

// Waits for window; a message above the whole window goes when nothing else is on its way.
absl::Status Exchange::AdmitLocked(size_t bytes, const base::ThreadPool::BlockingScope& blocking) {
  auto fits = [this, bytes]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const size_t taken = unreceived_bytes_ + refused_bytes_;
    return taken == 0 || taken + bytes <= limits_.window_bytes;
  };
  return AwaitLocked(fits, deadline_, blocking);
}

// The loan's end makes room in the window.
rpc::OutTensor Exchange::LendCounted(at::Tensor tensor) {
  const size_t bytes = tensor.nbytes();
  {
    absl::MutexLock lock(&mu_);
    unreceived_bytes_ += bytes;
    ++loans_;
    result_.bytes_sent += bytes;
  }
  return rpc::Lend(std::move(tensor), [self = shared_from_this(), bytes] {
    absl::MutexLock lock(&self->mu_);
    self->unreceived_bytes_ -= bytes;
    --self->loans_;
  });
}

rpc::CallOptions Exchange::LandingOptions(int chunk) {
  rpc::CallOptions options;
  {
    absl::MutexLock lock(&mu_);
    options.timeout = Until(deadline_);
  }
  if (staging_.direct(chunk)) {
    const shard_optim::Segment& segment = layout_.chunks()[chunk].segments.front();
    options.reply_into.push_back(parameters_.Slice(segment.parameter, segment.begin, segment.end));
  } else {
    options.reply_into.push_back(staging_.landing(chunk));
  }
  return options;
}

void Exchange::Push(const Step& step, int chunk, at::Tensor gradient, std::string defined) {
  absl::Status admitted;
  {
    base::ThreadPool::BlockingScope blocking;
    absl::MutexLock lock(&mu_);
    core_.Sent(chunk);
    admitted = AdmitLocked(gradient.defined() ? gradient.nbytes() : 0, blocking);
    if (admitted.ok()) pending_[chunk] = Pending{step, gradient, defined};
  }
  if (absl::IsDeadlineExceeded(admitted)) {
    admitted = absl::DeadlineExceededError(
        absl::StrCat("earlier gradients were not received: ", shards_->owner(layout_.chunks()[chunk].owner),
                     " or the way to it is stalled"));
  }
  if (!admitted.ok()) return Fail(chunk, admitted);
  SendPush(step, chunk, std::move(gradient), std::move(defined));
}

void Exchange::SendPush(const Step& step, int chunk, at::Tensor gradient, std::string defined) {
  shard_optim::PushGradient request;
  request.step = step.number;
  request.chunk = chunk;
  request.optimizer = step.optimizer;
  request.defined = std::move(defined);
  std::vector<rpc::OutTensor> tensors;
  if (gradient.defined()) tensors.push_back(LendCounted(std::move(gradient)));
  shards_->Call<shard_optim::PushGradient>(layout_.chunks()[chunk].owner, request, std::move(tensors),
                                           LandingOptions(chunk),
                                           [self = shared_from_this(), step, chunk](auto answer) {
                                             self->OnPushed(step, chunk, std::move(answer));
                                           });
}

void Exchange::OnPushed(const Step& step, int chunk,
                        absl::StatusOr<ShardSet::Answer<shard_optim::PushGradient>> answer) {
  if (!answer.ok()) {
    if (absl::IsResourceExhausted(answer.status()) && Retry(chunk, answer.status())) return;
    return Fail(chunk, answer.status());
  }
  if (step.exact && answer->reply.step != step.number) {
    return Fail(chunk, absl::DataLossError(absl::StrCat("a value of step ", answer->reply.step,
                                                        " came for step ", step.number)));
  }
  Arrived(chunk, answer->tensors, answer->reply.contributors, answer->reply.step);
}

// The owner took nothing, for want of room: the same is sent again after a pause. False if we no longer have
// it, or time is over.
bool Exchange::Retry(int chunk, const absl::Status& status) {
  absl::Duration pause;
  {
    absl::MutexLock lock(&mu_);
    std::optional<Pending>& push = pending_[chunk];
    if (!push.has_value() || push->refused) return false;
    pause =
        std::min(limits_.first_retry_pause * (1 << std::min(push->refusals, 8)), limits_.last_retry_pause);
    if (base::Now() + pause >= deadline_) return false;
    push->refused = true;
    ++push->refusals;
    refused_bytes_ += push->bytes();
  }
  rpc::Agent* agent = shards_->agent();
  agent->timer()->At(agent->clock()->Now() + pause, [weak = weak_from_this(), chunk, agent] {
    agent->pool()->Schedule([weak, chunk] {
      if (auto self = weak.lock()) self->Resend(chunk);
    });
  });
  return true;
}

void Exchange::Resend(int chunk) {
  Pending again;
  {
    absl::MutexLock lock(&mu_);
    std::optional<Pending>& push = pending_[chunk];
    if (!push.has_value() || !push->refused) return;
    push->refused = false;
    refused_bytes_ -= push->bytes();
    again = *push;
  }
  SendPush(again.step, chunk, std::move(again.gradient), std::move(again.defined));
}

void Exchange::ForgetLocked(int chunk, Released* released) {
  if (!pending_[chunk].has_value()) return;
  if (pending_[chunk]->refused) refused_bytes_ -= pending_[chunk]->bytes();
  released->push_back(std::move(pending_[chunk]->gradient));
  pending_[chunk].reset();
}

void Exchange::OpenLanding(int64_t step) {
  shard_optim::OpenLanding request;
  request.step = step;
  rpc::CallOptions options;
  {
    absl::MutexLock lock(&mu_);
    options.timeout = Until(deadline_);
  }
  for (int owner = 0; owner < shards_->count(); ++owner) {
    if (layout_.owners()[owner].chunk_count == 0) continue;
    {
      absl::MutexLock lock(&mu_);
      ++opening_;
    }
    shards_->Call<shard_optim::OpenLanding>(owner, request, {}, options,
                                            [self = shared_from_this()](auto answer) {
                                              absl::MutexLock lock(&self->mu_);
                                              --self->opening_;
                                              self->landing_status_.Update(answer.status());
                                            });
  }
}

void Exchange::Pull(int chunk, int64_t min_step) {
  {
    absl::MutexLock lock(&mu_);
    core_.Sent(chunk);
  }
  shard_optim::Pull request;
  request.chunk = chunk;
  request.min_step = min_step;
  shards_->Call<shard_optim::Pull>(layout_.chunks()[chunk].owner, request, {}, LandingOptions(chunk),
                                   [self = shared_from_this(), chunk](auto answer) {
                                     if (!answer.ok()) return self->Fail(chunk, answer.status());
                                     self->Arrived(chunk, answer->tensors, 0, answer->reply.step);
                                   });
}

void Exchange::StageValues() const {
  for (int parameter = 0; parameter < parameters_.count(); ++parameter) {
    const int bucket = layout_.bucket_of(parameter);
    if (bucket < 0 || staging_.direct(layout_.buckets()[bucket].first_chunk)) continue;
    staging_.Gather(layout_, parameter,
                    parameters_.Slice(parameter, 0, layout_.parameters()[parameter].numel()));
  }
}

void Exchange::Load(int chunk, int64_t step) {
  const shard_optim::Chunk& where = layout_.chunks()[chunk];
  at::Tensor values;
  if (staging_.direct(chunk)) {
    const shard_optim::Segment& segment = where.segments.front();
    values = parameters_.Slice(segment.parameter, segment.begin, segment.end);
  } else {
    values = staging_.gather(chunk);
  }
  rpc::CallOptions options;
  absl::Status admitted;
  {
    base::ThreadPool::BlockingScope blocking;
    absl::MutexLock lock(&mu_);
    core_.Sent(chunk);
    admitted = AdmitLocked(values.nbytes(), blocking);
    options.timeout = Until(deadline_);
  }
  if (absl::IsDeadlineExceeded(admitted)) {
    admitted = absl::DeadlineExceededError("earlier values were not received");
  }
  if (!admitted.ok()) return Fail(chunk, admitted);
  shard_optim::Load request;
  request.chunk = chunk;
  std::vector<rpc::OutTensor> tensors;
  tensors.push_back(LendCounted(std::move(values)));
  shards_->Call<shard_optim::Load>(where.owner, request, std::move(tensors), std::move(options),
                                   [self = shared_from_this(), chunk, step](auto answer) {
                                     if (!answer.ok()) return self->Fail(chunk, answer.status());
                                     absl::MutexLock lock(&self->mu_);
                                     self->core_.Landed(chunk, 0, self->in_rounds() ? step : 0);
                                   });
}

void Exchange::Arrived(int chunk, const std::vector<at::Tensor>& tensors, int contributors, int64_t step) {
  if (tensors.size() != 1 || tensors[0].numel() != layout_.chunks()[chunk].elements()) {
    return Fail(chunk, absl::DataLossError("an owner's answer without the chunk's value"));
  }
  if (!staging_.direct(chunk)) staging_.Scatter(layout_, chunk, parameters_);
  Released released;
  absl::MutexLock lock(&mu_);
  ForgetLocked(chunk, &released);
  if (!core_.Landed(chunk, contributors, in_rounds() ? step : 0)) return;
  result_.bytes_received += tensors[0].nbytes();
  result_.oldest_step = std::min(result_.oldest_step, step);
}

void Exchange::Fail(int chunk, absl::Status status) {
  Released released;
  absl::MutexLock lock(&mu_);
  ForgetLocked(chunk, &released);
  core_.Failed(chunk, base::Annotate(status, absl::StrCat("chunk ", chunk, " on ",
                                                          shards_->owner(layout_.chunks()[chunk].owner))));
}

std::string Exchange::MissingLocked() const {
  std::vector<std::string> names;
  for (int owner : core_.MissingOwners()) names.push_back(shards_->owner(owner));
  return absl::StrCat(core_.outstanding(), " of ", layout_.chunks().size(), " chunks are missing, of ",
                      absl::StrJoin(names, ", "));
}

absl::StatusOr<Exchange::Result> Exchange::Wait(absl::Time deadline) {
  base::ThreadPool::BlockingScope blocking;
  absl::MutexLock lock(&mu_);
  auto over = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return core_.over() && loans_ == 0; };
  const absl::Status waited = AwaitLocked(over, deadline, blocking);
  if (absl::IsDeadlineExceeded(waited)) {
    absl::Status late = absl::DeadlineExceededError(MissingLocked());
    if (!landing_status_.ok()) {
      return base::Annotate(landing_status_, absl::StrCat(late.message(), "; asking for the new values"));
    }
    return late;
  }
  ATOLL_RETURN_IF_ERROR(waited);
  ATOLL_RETURN_IF_ERROR(core_.End());
  result_.contributors = core_.contributors();
  return result_;
}

absl::Status Exchange::Settle(absl::Time deadline) {
  base::ThreadPool::BlockingScope blocking;
  absl::MutexLock lock(&mu_);
  auto idle = [this]()
                  ABSL_NO_THREAD_SAFETY_ANALYSIS { return core_.idle() && loans_ == 0 && opening_ == 0; };
  const absl::Status waited = AwaitLocked(idle, deadline, blocking);
  if (absl::IsDeadlineExceeded(waited)) {
    return absl::DeadlineExceededError(absl::StrCat("an earlier step is not over: ", MissingLocked()));
  }
  ATOLL_RETURN_IF_ERROR(waited);
  if (core_.over()) core_.End().IgnoreError();
  return absl::OkStatus();
}

absl::Status Exchange::AwaitLandings(absl::Time deadline) {
  base::ThreadPool::BlockingScope blocking;
  absl::MutexLock lock(&mu_);
  auto landed = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return core_.outstanding() == 0; };
  const absl::Status waited = AwaitLocked(landed, deadline, blocking);
  return absl::IsDeadlineExceeded(waited) ? absl::DeadlineExceededError(MissingLocked()) : waited;
}

std::vector<std::string> Exchange::torn() const {
  std::vector<std::string> names;
  absl::MutexLock lock(&mu_);
  for (int parameter : core_.torn()) names.push_back(parameters_.name(parameter));
  return names;
}

}  // namespace Atoll::client
