#include "atoll/rpc/batcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/rpc/user_code.h"

namespace Atoll::rpc {
namespace {

constexpr int kMaxSize = 1 << 20;

void AnswerAll(std::vector<ServerCall> calls, const absl::Status& status) {
  for (ServerCall& call : calls) std::move(call.responder).Reply(status);
}

}  // namespace

absl::StatusOr<std::shared_ptr<Batcher>> Batcher::Create(Agent* agent, Options options,
                                                         BatchHandler handler) {
  if (options.size < 1 || options.size > kMaxSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("a batch of ", options.size, " calls: it should be from 1 to ", kMaxSize));
  }
  if (options.delay <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a batch that waits for ", absl::FormatDuration(options.delay), ": it should be more than zero"));
  }
  if (handler == nullptr) return absl::InvalidArgumentError("a batcher needs a handler");
  return std::shared_ptr<Batcher>(new Batcher(agent, options, std::move(handler)));
}

Batcher::Batcher(Agent* agent, Options options, BatchHandler handler)
    : agent_(agent), options_(options), handler_(std::move(handler)) {}

// The agent may have ended before.
Batcher::~Batcher() {
  std::vector<ServerCall> calls;
  {
    absl::MutexLock lock(&mu_);
    calls.swap(waiting_);
  }
  AnswerAll(std::move(calls), absl::AbortedError("the batch it waited in has ended"));
}

Handler Batcher::handler() {
  return [self = shared_from_this()](ServerCall call) { self->Add(std::move(call)); };
}

void Batcher::Add(ServerCall call) {
  absl::Status stopped;
  std::vector<ServerCall> full;
  {
    absl::MutexLock lock(&mu_);
    stopped = stopped_;
    if (stopped.ok()) {
      waiting_.push_back(std::move(call));
      if (waiting_.size() >= static_cast<size_t>(options_.size)) {
        full = TakeLocked();
      } else if (waiting_.size() == 1 && options_.delay != absl::InfiniteDuration()) {
        // Timers are not for work.
        auto late = [weak = weak_from_this(), batch = batch_] {
          if (auto self = weak.lock()) self->HandOn(batch);
        };
        timer_ = agent_->timer()->At(agent_->clock()->Now() + options_.delay,
                                     [pool = agent_->pool(), late] { pool->Schedule(late); });
      }
    }
  }
  if (!stopped.ok()) return std::move(call.responder).Reply(stopped);
  Handle(std::move(full));
}

void Batcher::HandOn(uint64_t batch) {
  std::vector<ServerCall> calls;
  {
    absl::MutexLock lock(&mu_);
    if (batch_ == batch) calls = TakeLocked();
  }
  Handle(std::move(calls));
}

std::vector<ServerCall> Batcher::TakeLocked() {
  if (timer_ != 0) agent_->timer()->Cancel(std::exchange(timer_, 0));
  ++batch_;
  return std::exchange(waiting_, {});
}

void Batcher::Handle(std::vector<ServerCall> calls) const {
  auto given_up = std::stable_partition(calls.begin(), calls.end(),
                                        [](const ServerCall& call) { return !call.cancelled(); });
  std::vector<ServerCall> unwanted(std::make_move_iterator(given_up), std::make_move_iterator(calls.end()));
  calls.erase(given_up, calls.end());
  AnswerAll(std::move(unwanted), absl::CancelledError("its caller gave it up before its batch was whole"));
  if (calls.empty()) return;
  RunCallback("the handler of a batch", [&] {
    // Each came on streams of its own; this thread's are those of the last, or none.
    for (const ServerCall& call : calls) call.request.OnConsumed();
    handler_(std::move(calls));
  });
}

void Batcher::Flush() {
  std::vector<ServerCall> calls;
  {
    absl::MutexLock lock(&mu_);
    calls = TakeLocked();
  }
  if (calls.empty()) return;
  agent_->pool()->Schedule(
      [self = shared_from_this(), calls = std::move(calls)]() mutable { self->Handle(std::move(calls)); });
}

void Batcher::Stop(absl::string_view why) {
  std::vector<ServerCall> calls;
  absl::Status stopped;
  {
    absl::MutexLock lock(&mu_);
    if (stopped_.ok()) stopped_ = absl::AbortedError(why);
    stopped = stopped_;
    calls = TakeLocked();
  }
  AnswerAll(std::move(calls), stopped);
}

size_t Batcher::waiting() const {
  absl::MutexLock lock(&mu_);
  return waiting_.size();
}

}  // namespace Atoll::rpc
