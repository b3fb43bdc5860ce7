#include "atoll/rpc/retry.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {
namespace {

/// One call with all its attempts. Held by whatever goes on with it: an attempt's callback or a timer.
class Retrying : public std::enable_shared_from_this<Retrying> {
 public:
  Retrying(Agent* agent, absl::string_view to, const MethodId& method, CallOptions options, OnReply on_reply)
      : agent_(agent),
        to_(to),
        method_(method),
        policy_(*options.retry),
        options_(std::move(options)),
        deadline_(agent->clock()->Now() + *options_.timeout),
        backoff_(policy_.first_backoff),
        on_reply_(std::move(on_reply)) {
    options_.retry.reset();
    if (options_.on_received) {
      auto once = std::make_shared<std::atomic<bool>>(false);
      options_.on_received = [once, on_received = std::move(options_.on_received)] {
        if (!once->exchange(true)) on_received();
      };
    }
  }
  ~Retrying() { Finish(Explain(absl::CancelledError("this agent is shut down"))); }

  absl::Status Take(Payload request) {
    auto loans = std::make_shared<Loans>();
    body_ = std::move(request.body);
    metadata_ = std::move(request.metadata);
    for (OutTensor& tensor : request.tensors) {
      if (tensor.lent && tensor.on_return) loans->all.push_back(std::move(tensor.on_return));
    }
    {
      absl::MutexLock lock(&mu_);
      loans_ = std::move(loans);
    }
    if (policy_.max_attempts < 1 || policy_.first_backoff <= absl::ZeroDuration() ||
        policy_.max_backoff < policy_.first_backoff) {
      return absl::InvalidArgumentError(
          "a retry policy has at least 1 attempt, a first backoff above zero, and no greater than "
          "max_backoff");
    }
    for (OutTensor& tensor : request.tensors) {
      if (tensor.tensor.defined() && !tensor.tensor.device().is_cpu()) {
        return absl::InvalidArgumentError("a call that is made again carries tensors of the CPU only");
      }
      try {
        tensors_.push_back(tensor.lent || !tensor.tensor.defined() ? tensor.tensor : tensor.tensor.clone());
      } catch (...) {
        return absl::ResourceExhaustedError(absl::StrCat("no copy to send again: ", ExceptionText()));
      }
    }
    return absl::OkStatus();
  }

  void Begin() {
    if (options_.stop.stop_possible()) {
      // Of an attempt that is under way this is told as well; else it waits for the next one.
      on_stop_.emplace(options_.stop, [weak = weak_from_this(), agent = agent_] {
        agent->pool()->Schedule([weak] {
          auto self = weak.lock();
          if (self == nullptr || self->trying_.load()) return;
          self->Finish(self->Explain(absl::CancelledError("the caller asked to stop")));
        });
      });
    }
    Try();
  }

  void Refuse(const absl::Status& status) { Finish(Explain(base::WithRan(status, base::Ran::kNo))); }

 private:
  // The caller's loans. What the transport still reads of an attempt that has ended keeps them.
  struct Loans {
    std::vector<absl::AnyInvocable<void()>> all;
    ~Loans() {
      for (auto& on_return : all) RunCallback("the end of a loan", std::move(on_return));
    }
  };

  void Try() {
    std::shared_ptr<Loans> loans;
    {
      absl::MutexLock lock(&mu_);
      loans = loans_;
    }
    if (loans == nullptr) return;  // It has ended meanwhile.
    ++attempts_;
    trying_.store(true);
    Payload request;
    request.body = body_;
    request.metadata = metadata_;
    for (const at::Tensor& tensor : tensors_) {
      request.tensors.push_back(Lend(tensor, [loans] {}));
    }
    CallOptions options = options_;
    options.timeout = deadline_ - agent_->clock()->Now();
    agent_->Call(
        to_, method_, std::move(request), std::move(options),
        [self = shared_from_this()](absl::StatusOr<Received> reply) { self->OnAttempt(std::move(reply)); });
  }

  void OnAttempt(absl::StatusOr<Received> reply) {
    trying_.store(false);
    if (reply.ok()) return Finish(std::move(reply));
    const absl::Status status = reply.status();
    const absl::Time next = agent_->clock()->Now() + backoff_;
    base::Ran ran = base::GetRan(status);
    {
      absl::MutexLock lock(&mu_);
      last_ = status;
      may_have_run_ = may_have_run_ || ran != base::Ran::kNo;
      if (may_have_run_ && ran == base::Ran::kNo) ran = base::Ran::kMaybe;
    }
    if (!WorthAnother(status) || attempts_ >= policy_.max_attempts || next >= deadline_) {
      return Finish(base::WithRan(
          base::Annotate(status,
                         absl::StrCat("after ", attempts_, attempts_ == 1 ? " attempt" : " attempts")),
          ran));
    }
    backoff_ = std::min(2 * backoff_, policy_.max_backoff);
    agent_->timer()->At(next, [self = shared_from_this(), pool = agent_->pool()] {
      pool->Schedule([self] {
        if (!self->ended_.load()) self->Try();
      });
    });
  }

  bool WorthAnother(const absl::Status& status) const {
    const bool may_help =
        absl::IsUnavailable(status) || absl::IsDataLoss(status) || absl::IsResourceExhausted(status);
    return may_help && (policy_.safe_to_repeat || base::GetRan(status) == base::Ran::kNo);
  }

  absl::Status Explain(const absl::Status& status) const {
    absl::MutexLock lock(&mu_);
    return base::WithRan(
        absl::Status(status.code(), absl::StrCat("calling ", MethodText(method_.name, method_.version),
                                                 " on ", to_, " again: ", status.message(),
                                                 last_.ok() ? "" : "; the last attempt: ", last_.message())),
        may_have_run_ ? base::Ran::kMaybe : base::Ran::kNo);
  }

  void Finish(absl::StatusOr<Received> result) {
    if (ended_.exchange(true)) return;
    std::shared_ptr<Loans> loans;
    {
      absl::MutexLock lock(&mu_);
      loans.swap(loans_);
    }
    agent_->pool()->Schedule([loans = std::move(loans)] {});
    RunCallback(kOnReply, std::move(on_reply_), std::move(result));
  }

  Agent* const agent_;
  const std::string to_;
  const MethodId method_;
  const RetryPolicy policy_;
  CallOptions options_;  // Of each attempt.
  const absl::Time deadline_;
  std::string body_;
  Metadata metadata_;
  std::vector<at::Tensor> tensors_;
  mutable absl::Mutex mu_;
  std::shared_ptr<Loans> loans_ ABSL_GUARDED_BY(mu_);  // Until it has ended.
  // Of the attempt, or of the wait for the next.
  int attempts_ = 0;
  absl::Duration backoff_;
  absl::Status last_ ABSL_GUARDED_BY(mu_);
  bool may_have_run_ ABSL_GUARDED_BY(mu_) = false;
  std::atomic<bool> trying_{false};
  std::atomic<bool> ended_{false};
  OnReply on_reply_;
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

}  // namespace

void CallWithRetry(Agent* agent, absl::string_view to, const MethodId& method, Payload request,
                   CallOptions options, OnReply on_reply) {
  auto call = std::make_shared<Retrying>(agent, to, method, std::move(options), std::move(on_reply));
  const absl::Status taken = call->Take(std::move(request));
  if (!taken.ok()) {
    return agent->pool()->Schedule([call, taken] { call->Refuse(taken); });
  }
  call->Begin();
}

}  // namespace Atoll::rpc
