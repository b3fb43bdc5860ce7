#include "atoll/rpc/self_calls.h"

#include <atomic>
#include <functional>
#include <optional>
#include <stop_token>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/rpc/call_core.h"
#include "atoll/rpc/device.h"
#include "atoll/rpc/payload.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {

struct SelfCalls::Pending {
  MethodId method;
  OnReply on_reply;
  std::vector<at::Tensor> reply_into;
  Streams into_streams;
  std::atomic<bool> ended{false};  // Answered, or given up.
  std::atomic<base::Timer::Id> timer{0};
  std::stop_source stop;  // Of its handler.
  std::optional<std::stop_callback<std::function<void()>>> on_stop;
};

namespace {

// Tensors stay on their devices unless a map says otherwise.
Destination Here(const AgentOptions& options, const Payload& payload, bool reply) {
  Destination destination{{}, options.self, reply};
  auto found = options.device_maps.find(options.self.name);
  if (found != options.device_maps.end()) {
    destination.map = reply ? ReplyMap(found->second, found->second) : found->second;
    return destination;
  }
  for (const OutTensor& tensor : payload.tensors) {
    if (!tensor.tensor.defined() || tensor.tensor.device().is_cpu()) continue;
    destination.map.emplace(tensor.tensor.device().index(), tensor.tensor.device().index());
  }
  return destination;
}

}  // namespace

absl::Status SelfCalls::Explain(const absl::Status& status, const MethodId& method, base::Ran ran) const {
  return base::WithRan(
      absl::Status(status.code(), absl::StrCat("calling ", MethodText(method.name, method.version), " on ",
                                               hub_->self().ToString(), " (ourselves): ", status.message(),
                                               " (ran: ", base::RanName(ran), ")")),
      ran);
}

absl::Status SelfCalls::Run(const MethodId& method, Payload request, absl::Time deadline,
                            std::stop_token stop, Responder& responder) {
  const Destination destination = Here(hub_->options(), request, /*reply=*/false);
  // Everything is copied below, before this returns.
  for (OutTensor& tensor : request.tensors)
    tensor.on_return = tensor.lent ? std::move(tensor.on_return) : nullptr;
  for (OutTensor& tensor : request.tensors) tensor.lent = true;
  ATOLL_ASSIGN_OR_RETURN(Prepared prepared, Prepare(hub_, std::move(request), destination));
  if (!ValidMethodName(method.name)) {
    return absl::InvalidArgumentError("a method's name is at most 128 bytes of [a-z0-9_.]");
  }
  Hub::Serving serving = hub_->BeginServing();
  if (!serving) return absl::CancelledError("this agent is shut down");
  std::string why;
  std::shared_ptr<const Method> served = hub_->FindMethod(method, &why);
  if (served == nullptr) return absl::NotFoundError(why);
  std::vector<TensorIn> tensors = AsReceived(prepared);
  ServerCall call;
  call.caller = hub_->self();
  call.method = method;
  ATOLL_RETURN_IF_ERROR(AddStreams(tensors, &prepared.streams));
  ATOLL_ASSIGN_OR_RETURN(call.request.tensors, AllocateFor(*served, hub_->buffers(), call.caller,
                                                           prepared.body, tensors, prepared.streams));
  FillInline(call.request.tensors, tensors);
  ATOLL_RETURN_IF_ERROR(CopyHere(prepared, call.request.tensors));
  if (!prepared.streams.empty()) call.request.streams = std::make_shared<Streams>(prepared.streams);
  call.request.body = std::move(prepared.body);
  call.request.metadata = std::move(prepared.metadata);
  call.deadline = deadline;
  call.stop = stop;
  call.cancelled = [stop = std::move(stop), hub = hub_, deadline] {
    return stop.stop_requested() || hub->Now() >= deadline;
  };
  call.responder = std::move(responder);
  if (!prepared.streams.empty()) {
    call.responder = Responder::From([streams = prepared.streams, inner = std::move(call.responder)](
                                         absl::StatusOr<Payload> reply) mutable {
      absl::Status ordered = Guarded("ordering the reply", [&] { streams.CurrentAwait({}); });
      if (!ordered.ok()) reply = ordered;
      std::move(inner).Reply(std::move(reply));
    });
  }
  const absl::Status allowed = hub_->OnServe(call);
  if (!allowed.ok()) {
    responder = std::move(call.responder);  // It ends behind the refusal.
    return allowed;
  }
  hub_->Dispatch(std::move(serving), std::move(served), std::move(call));
  return absl::OkStatus();
}

void SelfCalls::Call(const MethodId& method, Payload request, CallOptions options, OnReply on_reply) {
  auto pending = std::make_shared<Pending>();
  pending->method = method;
  pending->on_reply = std::move(on_reply);
  {
    absl::MutexLock lock(&mu_);
    pending_.insert(pending);
  }
  const absl::Duration timeout = *options.timeout;
  absl::Time deadline = hub_->Now() + timeout;
  absl::Status status = options.stop.stop_requested()     ? absl::CancelledError("the caller asked to stop")
                        : timeout <= absl::ZeroDuration() ? NoAnswerWithin(timeout)
                                                          : CheckLanding(options.reply_into);
  if (status.ok()) status = OrderInto(options.reply_into, &pending->into_streams);
  if (status.ok()) {
    pending->reply_into = std::move(options.reply_into);
    auto self = shared_from_this();
    pending->timer = hub_->At(deadline, [self, timeout, weak = std::weak_ptr<Pending>(pending)] {
      auto late = weak.lock();
      if (late == nullptr) return;
      self->GiveUp(late, NoAnswerWithin(timeout));
    });
    if (options.stop.stop_possible()) {
      pending->on_stop.emplace(std::move(options.stop), [self, weak = std::weak_ptr<Pending>(pending)] {
        if (auto stopped = weak.lock())
          self->GiveUp(stopped, absl::CancelledError("the caller asked to stop"));
      });
    }
    Responder responder = Responder::From(
        [self, pending](absl::StatusOr<Payload> reply) { self->Answer(pending, std::move(reply)); });
    status = Run(method, std::move(request), deadline, pending->stop.get_token(), responder);
    // A responder that was not given away ends with this block: the refusal comes first.
    if (!status.ok()) {
      End(pending, Explain(status, method, base::Ran::kNo));
    } else if (options.on_received != nullptr) {
      CallbackExecutor(hub_->executor(), kOnReceived).Schedule(std::move(options.on_received));
    }
    return;
  }
  ReturnLoans(hub_, std::move(request));
  End(pending, Explain(status, method, base::Ran::kNo));
}

void SelfCalls::Answer(const std::shared_ptr<Pending>& pending, absl::StatusOr<Payload> reply) {
  if (!reply.ok()) return End(pending, Explain(reply.status(), pending->method, base::Ran::kYes));
  const Destination destination = Here(hub_->options(), *reply, /*reply=*/true);
  for (OutTensor& tensor : reply->tensors)
    tensor.on_return = tensor.lent ? std::move(tensor.on_return) : nullptr;
  for (OutTensor& tensor : reply->tensors) tensor.lent = true;
  absl::StatusOr<Prepared> prepared = Prepare(hub_, *std::move(reply), destination);
  if (!prepared.ok()) return End(pending, Explain(prepared.status(), pending->method, base::Ran::kYes));
  std::vector<TensorIn> tensors = AsReceived(*prepared);
  absl::Status landed = AddStreams(tensors, &prepared->streams);
  if (!landed.ok()) return End(pending, Explain(landed, pending->method, base::Ran::kYes));
  StreamScope scope(prepared->streams);
  Received result;
  if (pending->reply_into.empty()) {
    absl::StatusOr<std::vector<at::Tensor>> fresh = AllocateFresh(hub_->buffers(), tensors);
    if (!fresh.ok()) return End(pending, Explain(fresh.status(), pending->method, base::Ran::kYes));
    result.tensors = *std::move(fresh);
    FillInline(result.tensors, tensors);
    landed = CopyHere(*prepared, result.tensors);
  } else {
    absl::Status match = CheckMatch(pending->reply_into, tensors, "reply_into");
    if (!match.ok()) return End(pending, Explain(match, pending->method, base::Ran::kYes));
    // From here on the deadline cannot end it: the caller's memory is being written.
    if (pending->ended.exchange(true)) return;
    result.tensors = pending->reply_into;
    FillInline(result.tensors, tensors);
    landed = Guarded("ordering memory to receive into", [&] {
      pending->into_streams.CurrentAwait({});
      for (const at::Tensor& tensor : result.tensors) prepared->streams.Keep(tensor);
    });
    if (landed.ok()) landed = CopyHere(*prepared, result.tensors);
    pending->ended.store(false);
  }
  if (!landed.ok()) return End(pending, Explain(landed, pending->method, base::Ran::kYes));
  result.metadata = std::move(prepared->metadata);
  result.body = std::move(prepared->body);
  if (!prepared->streams.empty()) result.streams = std::make_shared<Streams>(prepared->streams);
  End(pending, std::move(result));
}

void SelfCalls::GiveUp(const std::shared_ptr<Pending>& pending, const absl::Status& why) {
  pending->stop.request_stop();
  End(pending, Explain(why, pending->method, base::Ran::kMaybe));
}

void SelfCalls::End(const std::shared_ptr<Pending>& pending, absl::StatusOr<Received> result) {
  if (pending->ended.exchange(true)) return;
  if (base::Timer::Id timer = pending->timer.load(); timer != 0) hub_->Cancel(timer);
  {
    absl::MutexLock lock(&mu_);
    pending_.erase(pending);
  }
  bool ok = result.ok();
  base::Task task = [ok, on_reply = std::move(pending->on_reply), result = std::move(result)]() mutable {
    const std::shared_ptr<const Streams> streams = ok ? result->streams : nullptr;
    StreamScope scope(streams == nullptr ? Streams() : *streams);
    RunCallback(kOnReply, std::move(on_reply), std::move(result));
  };
  ok ? hub_->Schedule(std::move(task)) : hub_->ScheduleFailure(std::move(task));
}

void SelfCalls::Send(const MethodId& method, Payload request,
                     absl::AnyInvocable<void(absl::Status)> on_received) {
  Responder responder = Responder::From([hub = hub_](absl::StatusOr<Payload> reply) {
    if (reply.ok()) ReturnLoans(hub, *std::move(reply));
  });
  absl::Status status = Run(method, std::move(request), absl::InfiniteFuture(), std::stop_token(), responder);
  std::move(on_received)(status.ok() ? status : Explain(status, method, base::Ran::kNo));
}

void SelfCalls::FailAll(const absl::Status& reason) {
  std::vector<std::shared_ptr<Pending>> all;
  {
    absl::MutexLock lock(&mu_);
    all.assign(pending_.begin(), pending_.end());
  }
  for (const auto& pending : all) GiveUp(pending, reason);
}

}  // namespace Atoll::rpc
