// Session: calls out and their ends, requests in and their answers.
#include <atomic>
#include <stop_token>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/clock.h"
#include "atoll/base/log.h"
#include "atoll/rpc/session_state.h"
#include "atoll/rpc/user_code.h"

namespace Atoll::rpc {
namespace {

// What a request that waits takes beside its bytes, about; and what small ones may take beyond the limit, so
// that a large one holds up no release and no heartbeat.
constexpr size_t kBytesARequest = 1024;
constexpr size_t kSmallRequest = 8 << 10;
constexpr size_t kRoomForSmall = size_t{64} << 20;

}  // namespace

void Session::Call(const MethodId& method, Payload request, CallOptions options, OnReply on_reply) {
  auto call = std::make_unique<ClientCall>();
  call->method = method;
  call->on_reply = std::move(on_reply);
  call->reply_inline = options.reply_inline;
  Start(std::move(call), std::move(request), std::move(options));
}

void Session::Send(const MethodId& method, Payload request,
                   absl::AnyInvocable<void(absl::Status)> on_received) {
  auto call = std::make_unique<ClientCall>();
  call->method = method;
  call->one_way = true;
  call->reply_inline = true;
  call->on_reply = [on_received = std::move(on_received)](const absl::StatusOr<Received>& taken) mutable {
    std::move(on_received)(taken.status());
  };
  CallOptions options;
  options.timeout = absl::InfiniteDuration();
  Start(std::move(call), std::move(request), std::move(options));
}

// Tells the session that the caller asks to stop, whether its call is numbered by then or not.
struct StopLink {
  std::weak_ptr<Session> session;
  std::atomic<uint64_t> id{0};
  std::atomic<bool> stopped{false};
};

void Session::Start(std::unique_ptr<ClientCall> call, Payload request, CallOptions options) {
  const MethodId& method = call->method;
  size_t reserved = 0;
  auto refuse = [&](const absl::Status& status) {
    hub_->ScheduleFailure([self = shared_from_this(), call = std::move(call), status]() mutable {
      self->Fail(std::move(call), status, base::Ran::kNo);
    });
  };
  call->timeout = *options.timeout;
  call->deadline = hub_->Now() + call->timeout;
  const bool stopped = options.stop.stop_requested();
  if (stopped || call->timeout <= absl::ZeroDuration()) {
    ReturnLoans(hub_, std::move(request));
    return refuse(stopped ? absl::CancelledError("the caller asked to stop") : NoAnswerWithin(call->timeout));
  }
  if (options.wait_for_room) {
    absl::Status room = AwaitRoom(request, options, &reserved);
    if (!room.ok()) {
      ReturnLoans(hub_, std::move(request));
      return refuse(room);
    }
  }
  auto release = [this](size_t& bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (bytes == 0) return;
    reserved_bytes_ -= std::exchange(bytes, 0);
    --reserved_calls_;
  };
  absl::Cleanup release_unused = [&]() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    release(reserved);
  };
  absl::StatusOr<Prepared> prepared = Prepare(hub_, std::move(request), DestinationOf(/*reply=*/false));
  if (!prepared.ok()) return refuse(prepared.status());
  if (!ValidMethodName(method.name)) {
    return refuse(absl::InvalidArgumentError("a method's name is at most 128 bytes of [a-z0-9_.]"));
  }
  absl::Status landing = CheckLanding(options.reply_into);
  if (landing.ok()) landing = OrderInto(options.reply_into, &call->into_streams);
  if (!landing.ok()) return refuse(landing);
  call->reply_into = std::move(options.reply_into);
  std::string header = EncodeRequest(method, call->timeout, call->one_way, prepared->metadata, prepared->body,
                                     prepared->fields);
  bool ack_now = !prepared->loans.empty() || options.on_received != nullptr;
  std::shared_ptr<Message> message = MakeMessage(std::move(header), *std::move(prepared), ack_now);
  message->deadline = call->deadline;
  message->on_received = std::move(options.on_received);
  call->request = message;
  std::shared_ptr<StopLink> link;
  if (options.stop.stop_possible()) {
    link = std::make_shared<StopLink>();
    link->session = weak_from_this();
    call->on_stop.emplace(std::move(options.stop), [link] {
      link->stopped.store(true);
      const uint64_t id = link->id.load();
      if (id == 0) return;
      if (auto session = link->session.lock()) session->StopCall(id);
    });
  }
  absl::Status status;
  std::unique_ptr<PendingCall> refused;
  uint64_t id = 0;
  bool at_once = false;
  {
    absl::MutexLock lock(&mu_);
    const size_t others = reserved_calls_ - (reserved > 0 ? 1 : 0);
    if (calls_.size() + others >= hub_->options().max_calls_in_flight) {
      status = absl::ResourceExhaustedError(
          absl::StrCat(calls_.size(), " calls to this member are not answered yet, and at most ",
                       hub_->options().max_calls_in_flight, " may be"));
    } else {
      id = calls_.Add(std::move(call));
      release(reserved);  // It counts itself now.
      SetCall(message->header.data(), id, calls_.watermark());
      const absl::Time now = hub_->Now();
      status = core_.Post(message, now);  // It may end with the lock's scope: not inside.
      at_once = !InBurst(now) || !message->buffers.empty();
      if (!status.ok()) refused = calls_.Take(id);
    }
  }
  if (refused != nullptr) call.reset(static_cast<ClientCall*>(refused.release()));
  if (!status.ok()) return refuse(status);
  Flush(at_once);
  if (link == nullptr) return;
  link->id.store(id);
  if (link->stopped.load()) StopCall(id);
}

// Reserves what `request` takes, so that those that wait together do not all go at once.
absl::Status Session::AwaitRoom(const Payload& request, const CallOptions& options, size_t* reserved) {
  size_t bytes = kBytesARequest + request.body.size();
  Lane lane = Lane::kControl;
  for (const OutTensor& tensor : request.tensors) {
    if (!tensor.tensor.defined() || tensor.tensor.layout() != at::kStrided) continue;  // Refused below.
    bytes += tensor.tensor.nbytes();
    if (tensor.tensor.nbytes() > hub_->options().inline_bytes) lane = Lane::kBulk;
  }
  auto has_room = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return calls_.size() + reserved_calls_ < hub_->options().max_calls_in_flight &&
           core_.HasRoom(lane, bytes, reserved_bytes_);
  };
  auto over = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return core_.dead() || options.stop.stop_requested() || has_room();
  };
  auto take = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::Status {
    if (core_.dead()) return core_.death();
    if (options.stop.stop_requested()) return absl::CancelledError("the caller asked to stop");
    if (!has_room()) return absl::DeadlineExceededError("no room for it before the call's deadline");
    *reserved = bytes;
    reserved_bytes_ += bytes;
    ++reserved_calls_;
    return absl::OkStatus();
  };
  {
    absl::MutexLock lock(&mu_);
    if (over()) return take();
  }
  base::ThreadPool::BlockingScope blocking;
  if (!blocking.ok()) return absl::ResourceExhaustedError("too many threads of the pool wait already");
  // Asked to stop, the condition is looked at again.
  std::stop_callback wake(options.stop, [this] { absl::MutexLock look(&mu_); });
  absl::MutexLock lock(&mu_);
  base::AwaitFor(mu_, absl::Condition(&over), *options.timeout);
  return take();
}

void Session::StopCall(uint64_t id) {
  std::vector<std::unique_ptr<PendingCall>> calls;
  std::shared_ptr<transport::Pipe> cut;
  const absl::Status why = absl::CancelledError("the caller asked to stop");
  {
    absl::MutexLock lock(&mu_);
    PendingCall* call = calls_.Find(id);
    if (call == nullptr) return;
    if (call->landing) {
      call->expired = true;
      cut = BulkPipe();
    } else {
      calls.push_back(calls_.Take(id));
    }
  }
  // As at a deadline: the memory that its reply lands in is given back when that has ended.
  if (cut != nullptr) cut->Close(why);
  End(std::move(calls), why);
  Drain();
}

void Session::Fail(std::unique_ptr<ClientCall> call, const absl::Status& status, base::Ran ran) {
  absl::Status explained = Explain(status, call->method, ran);
  if (call->torn) {
    explained =
        base::WithRan(absl::DataLossError(absl::StrCat(explained.message(),
                                                       "; its reply had begun to land in the caller's "
                                                       "memory, whose contents are undefined")),
                      base::Ran::kYes);
  }
  RunCallback(kOnReply, std::move(call->on_reply), std::move(explained));
}

// Where no user code may run: on the thread of failures.
void Session::FailLater(std::unique_ptr<PendingCall> call, const absl::Status& status, base::Ran ran) {
  hub_->ScheduleFailure([self = shared_from_this(), call = std::move(call), status, ran]() mutable {
    self->Fail(std::unique_ptr<ClientCall>(static_cast<ClientCall*>(call.release())), status, ran);
  });
}

void Session::End(std::vector<std::unique_ptr<PendingCall>> calls, const absl::Status& why) {
  if (calls.empty()) return;
  std::vector<std::pair<std::unique_ptr<ClientCall>, base::Ran>> ended;
  std::vector<OutMessagePtr> requests;  // Let go of without the lock: their loans end, and memory of users.
  {
    absl::MutexLock lock(&mu_);
    for (std::unique_ptr<PendingCall>& call : calls) {
      base::Ran ran = RanUnanswered(*call);
      if (OutMessagePtr request = call->request.lock()) {
        if (core_.Withdraw(request.get(), hub_->Now())) ran = base::Ran::kNo;
        requests.push_back(std::move(request));
      }
      // The other side may stop its work: nobody waits for it.
      if (ran != base::Ran::kNo && !core_.dead()) {
        auto cancel = MakeMessage(EncodeBare(Kind::kData, What::kCancel, call->id));
        core_.Post(std::move(cancel), hub_->Now(), /*force=*/true).IgnoreError();
      }
      ended.emplace_back(static_cast<ClientCall*>(call.release()), ran);
    }
  }
  hub_->ScheduleFailure([self = shared_from_this(), ended = std::move(ended), why]() mutable {
    for (auto& [call, ran] : ended) {
      const absl::Status status = why.ok() ? NoAnswerWithin(call->timeout) : why;
      self->Fail(std::move(call), status, ran);
    }
  });
}

void Session::Complete(std::unique_ptr<ClientCall> call, const Header& header,
                       std::vector<at::Tensor> tensors, Streams streams) {
  absl::StatusOr<Received> result = Received();
  // It may not be acknowledged yet, and its caller goes on now: no later kernel of his may overtake its
  // reads.
  if (OutMessagePtr request = call->request.lock()) static_cast<Message*>(request.get())->ReturnToOrigins();
  if (header.code != absl::StatusCode::kOk && call->torn) {
    // A first reply had begun to land, and could not be sent again.
    return hub_->ScheduleFailure([self = shared_from_this(), call = std::move(call),
                                  status = absl::Status(header.code, header.message)]() mutable {
      self->Fail(std::move(call), status, base::Ran::kYes);
    });
  }
  if (header.code != absl::StatusCode::kOk) {
    result = Explain(absl::Status(header.code, header.message), call->method, header.ran);
  } else if (call->torn && tensors.size() == header.tensors.size()) {
    // Landed whole, in reply_into.
    FillInline(tensors, header.tensors);
    result->tensors = std::move(tensors);
  } else if (!call->reply_into.empty()) {
    absl::Status match = CheckMatch(call->reply_into, header.tensors, "reply_into");
    if (match.ok()) {
      FillInline(call->reply_into, header.tensors);
      result->tensors = std::move(call->reply_into);
    } else {
      result = Explain(match, call->method, base::Ran::kYes);
    }
  } else {
    if (tensors.empty() && !header.tensors.empty()) {
      absl::StatusOr<std::vector<at::Tensor>> fresh = AllocateFresh(hub_->buffers(), header.tensors);
      if (fresh.ok()) {
        tensors = *std::move(fresh);
      } else {
        result = Explain(fresh.status(), call->method, base::Ran::kYes);
      }
    }
    if (result.ok()) {
      FillInline(tensors, header.tensors);
      result->tensors = std::move(tensors);
    }
  }
  if (result.ok()) {
    result->body = std::string(header.body);
    result->metadata = ToMetadata(header);
  }
  if (result.ok() && !streams.empty()) result->streams = std::make_shared<Streams>(streams);
  if (call->reply_inline) {
    StreamScope scope(streams);
    return RunCallback(kOnReply, std::move(call->on_reply), std::move(result));
  }
  hub_->Schedule(
      [call = std::move(call), result = std::move(result), streams = std::move(streams)]() mutable {
        StreamScope scope(streams);
        RunCallback(kOnReply, std::move(call->on_reply), std::move(result));
      });
}

void Session::Refuse(uint64_t call, const absl::Status& status) {
  {
    absl::MutexLock lock(&mu_);
    served_.Answer(call);
  }
  std::string header = EncodeErrorReply(status, base::Ran::kNo);
  SetCall(header.data(), call, 0);
  Post(MakeMessage(std::move(header)), /*force=*/true).IgnoreError();
}

// Its share, which it keeps until its handler begins. None for a method that waits for no thread of ours.
absl::StatusOr<std::shared_ptr<Session::BacklogWait>> Session::JoinBacklog(const Method& method,
                                                                           const Header& header) const {
  if (method.options.executor != nullptr) return std::shared_ptr<BacklogWait>();
  size_t bytes = kBytesARequest + header.body.size();
  for (const TensorIn& tensor : header.tensors) bytes += tensor.meta.bytes();
  const size_t waiting = backlog_->bytes.load();
  const size_t limit = hub_->options().backlog_bytes + (bytes <= kSmallRequest ? kRoomForSmall : 0);
  if (waiting == 0 || waiting + bytes <= limit) return std::make_shared<BacklogWait>(backlog_, bytes);
  return absl::ResourceExhaustedError(
      absl::StrCat(waiting, " bytes of requests of this member wait for a thread already"));
}

void Session::RunRequest(const Header& header, std::vector<at::Tensor> tensors, Streams streams,
                         absl::Status refusal, std::shared_ptr<BacklogWait> wait) {
  const bool one_way = (header.prefix.flags & kFlagOneWay) != 0;
  const uint64_t id = header.prefix.call;
  MethodId method{std::string(header.method), header.version};
  ServedTable::Admitted admitted{ServedTable::Admission::kRun, {}, {}};
  base::MemberId caller;
  {
    absl::MutexLock lock(&mu_);
    caller = peer_.id;
    if (!one_way) admitted = served_.Admit(id, header.prefix.watermark);
    if (admitted.admission == ServedTable::Admission::kFull && refusal.ok()) {
      refusal = absl::ResourceExhaustedError(
          absl::StrCat("it already serves ", served_.size(), " calls of this member"));
    }
  }
  for (std::stop_source& stop : admitted.given_up) stop.request_stop();
  if (admitted.admission == ServedTable::Admission::kUnwanted) return;
  std::string why;
  std::shared_ptr<const Method> served;
  Hub::Serving serving = hub_->BeginServing();
  if (refusal.ok() && !serving) refusal = absl::UnavailableError("it is shutting down");
  if (refusal.ok()) {
    served = hub_->FindMethod(method, &why);
    if (served == nullptr) refusal = absl::NotFoundError(why);
  }
  if (refusal.ok() && wait == nullptr) {
    absl::StatusOr<std::shared_ptr<BacklogWait>> joined = JoinBacklog(*served, header);
    refusal = joined.status();
    if (joined.ok()) wait = *std::move(joined);
  }
  if (refusal.ok() && tensors.empty() && !header.tensors.empty()) {
    absl::StatusOr<std::vector<at::Tensor>> into =
        AllocateFor(*served, hub_->buffers(), caller, header.body, header.tensors, streams);
    if (into.ok()) {
      tensors = *std::move(into);
    } else {
      refusal = into.status();
    }
  }
  if (!refusal.ok()) return Refuse(id, refusal);
  FillInline(tensors, header.tensors);
  ServerCall call;
  call.caller = std::move(caller);
  call.method = std::move(method);
  call.request.body = std::string(header.body);
  call.request.metadata = ToMetadata(header);
  call.request.tensors = std::move(tensors);
  if (!streams.empty()) call.request.streams = std::make_shared<Streams>(streams);
  call.deadline = hub_->Now() + header.timeout;
  call.stop = admitted.stop;
  call.cancelled = [stop = std::move(admitted.stop), hub = hub_, deadline = call.deadline] {
    return stop.stop_requested() || hub->Now() >= deadline;
  };
  call.responder = one_way ? Unheard() : ResponderOf(id, std::move(streams));
  const absl::Status allowed = hub_->OnServe(call);
  if (!allowed.ok()) return Refuse(id, allowed);  // What ends with `call` finds it answered.
  if (one_way) {
    // Taken, to be run once.
    std::string taken = EncodeReply({}, "", {});
    SetCall(taken.data(), id, 0);
    Post(MakeMessage(std::move(taken)), /*force=*/true).IgnoreError();
  }
  hub_->Dispatch(std::move(serving), std::move(served), std::move(call),
                 [wait = std::move(wait)]() mutable { wait = nullptr; });
}

Responder Session::Unheard() const {
  return Responder::From([hub = hub_](absl::StatusOr<Payload> reply) {
    if (reply.ok()) ReturnLoans(hub, *std::move(reply));
  });
}

Responder Session::ResponderOf(uint64_t id, Streams streams) {
  return Responder::From(
      [self = shared_from_this(), id, streams = std::move(streams)](absl::StatusOr<Payload> reply) {
        // The handler's work is in the reply whichever thread gives it.
        absl::Status ordered = Guarded("ordering the reply", [&] { streams.CurrentAwait({}); });
        if (!ordered.ok()) {
          if (reply.ok()) ReturnLoans(self->hub_, *std::move(reply));
          reply = ordered;
        }
        self->Reply(id, std::move(reply));
      });
}

void Session::Reply(uint64_t id, absl::StatusOr<Payload> reply) {
  bool wanted = false;
  {
    absl::MutexLock lock(&mu_);
    wanted = served_.Answer(id);
  }
  // Prepared even if unwanted: so its loans return.
  absl::StatusOr<Prepared> prepared =
      reply.ok() ? Prepare(hub_, *std::move(reply), DestinationOf(/*reply=*/true)) : reply.status();
  if (!wanted) return;
  std::shared_ptr<Message> message;
  if (prepared.ok()) {
    std::string header = EncodeReply(prepared->metadata, prepared->body, prepared->fields);
    bool lent = !prepared->loans.empty();
    message = MakeMessage(std::move(header), *std::move(prepared), lent);
  } else {
    message = MakeMessage(EncodeErrorReply(prepared.status(), base::Ran::kYes));
  }
  SetCall(message->header.data(), id, 0);
  absl::Status status = Post(message);
  if (absl::IsResourceExhausted(status)) {
    message = MakeMessage(EncodeErrorReply(base::Annotate(status, "its reply"), base::Ran::kYes));
    SetCall(message->header.data(), id, 0);
    Post(message, /*force=*/true).IgnoreError();
  }
}

}  // namespace Atoll::rpc
