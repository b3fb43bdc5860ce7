// Session: messages in.
//
//   OnDescriptor ── hello, bye, ack
//        ├── data in the header alone, or a bundle of such: OnPlainData: received at once, dispatched
//        └── data with tensors: OnTensorData: where they land ─> Pipe::Read ─> OnLanded: received, dispatched
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/rpc/session_state.h"

namespace Atoll::rpc {
namespace {

// A peer that breaks the protocol so often within this time is not spoken to any more.
constexpr int kMaxViolations = 3;
constexpr absl::Duration kViolationsFor = absl::Minutes(10);

bool TargetsMatch(const Header& header, const transport::Descriptor& descriptor) {
  size_t next = 0;
  for (const TensorIn& tensor : header.tensors) {
    if (!tensor.is_inline && descriptor.tensors[next++].target != ToTransport(tensor.meta.device))
      return false;
  }
  return true;
}

}  // namespace

void Session::StartRead(const PipePtr& pipe) {
  pipe->pipe->ReadDescriptor(
      [self = shared_from_this(), pipe](absl::StatusOr<transport::Descriptor> descriptor) {
        self->OnDescriptor(pipe, std::move(descriptor));
      });
}

void Session::OnDescriptor(const PipePtr& pipe, absl::StatusOr<transport::Descriptor> descriptor) {
  if (!descriptor.ok()) return PipeClosed(pipe, descriptor.status());
  absl::InlinedVector<size_t, 8> sizes;
  for (const auto& tensor : descriptor->tensors) sizes.push_back(tensor.bytes);
  absl::StatusOr<Header> header = Decode(descriptor->header, sizes);
  if (header.ok() && !TargetsMatch(*header, *descriptor)) {
    header = absl::InvalidArgumentError("a tensor for another device than the pipe announced");
  }
  if (!header.ok()) return Violation(pipe, header.status());
  const Prefix& prefix = header->prefix;
  if (!pipe->greeted.load() && prefix.kind != Kind::kHello) {
    return PipeClosed(pipe, absl::DataLossError("the first message of a pipe is a hello: it was lost"));
  }
  if (pipe->greeted.load() && prefix.kind == Kind::kHello) {
    return Violation(pipe, absl::InvalidArgumentError("a second hello on one pipe"));
  }
  switch (prefix.kind) {
    case Kind::kHello:
      pipe->greeted.store(true);
      OnHello(pipe, *header);
      break;
    case Kind::kBye:
      return OnBye();
    case Kind::kAck: {
      absl::Status status;
      {
        absl::MutexLock lock(&mu_);
        heard_ = hub_->Now();
        status = core_.OnAcks(prefix.acks, heard_);
        if ((prefix.flags & kFlagOpenBulk) != 0) core_.OnAskedForBulk(heard_);
      }
      if (!status.ok()) return Violation(pipe, status);
      Drain();
      break;
    }
    case Kind::kBundle:
    case Kind::kData:
      if (descriptor->tensors.empty()) {
        const bool go_on = prefix.kind == Kind::kBundle
                               ? OnBundle(pipe, *header)
                               : OnPlainData(pipe, *header, descriptor->header.size());
        Drain();
        if (!go_on) return;
        break;
      }
      auto in = std::make_shared<Incoming>();
      in->pipe = pipe;
      in->descriptor = *std::move(descriptor);
      // A header is longer than what a std::string holds in itself: its bytes, and the views, stay in place.
      in->header = *std::move(header);
      return OnTensorData(std::move(in));
  }
  StartRead(pipe);
}

void Session::OnHello(const PipePtr& pipe, const Header& header) {
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = heard_ = hub_->Now();
    if (!core_.dead()) {
      address_ = pipe->pipe->peer().address;
      peer_limits_ = header.hello.limits;
      if (peer_.addresses.empty() && !header.hello.addresses.empty()) {
        peer_.addresses = header.hello.addresses;
        core_.SetCanConnect(now);
      }
      auto ours = hub_->options().device_maps.find(peer_.id.name);
      reply_map_ = ReplyMap(header.hello.device_map,
                            ours == hub_->options().device_maps.end() ? DeviceMap() : ours->second);
    }
    core_.OnHello(pipe->id, pipe->lane, pipe->initiated, header.hello, header.prefix.acks, now);
  }
  Drain();
}

void Session::OnBye() {
  Die(absl::UnavailableError("it shut down in order"), /*notify=*/true, /*quiet=*/true);
}

void Session::Violation(const PipePtr& pipe, const absl::Status& status) {
  int count = 0;
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = hub_->Now();
    if (now - violations_since_ > kViolationsFor) {
      violations_ = 0;
      violations_since_ = now;
    }
    count = ++violations_;
  }
  absl::Status reason = base::Annotate(status, "it broke the protocol");
  ATOLL_LOG(kWarning) << "closing a pipe of " << peer().id.ToString() << ": " << reason.message();
  PipeClosed(pipe, reason);
  if (count >= kMaxViolations) Die(reason, /*notify=*/true, /*quiet=*/false);
}

// What is between was lost on the way, and comes again with the next pipe.
void Session::TooEarly(const PipePtr& pipe, uint64_t number) {
  if (number == 0) return Violation(pipe, absl::InvalidArgumentError("a message without a number"));
  PipeClosed(pipe,
             absl::DataLossError(absl::StrCat("message ", number, " came too early: others were lost")));
}

bool Session::IsLanding(uint64_t id) {
  const PendingCall* call = calls_.Find(id);
  return call != nullptr && call->landing;
}

bool Session::OnPlainData(const PipePtr& pipe, const Header& header, size_t bytes) {
  const Prefix& prefix = header.prefix;
  absl::Status status;
  SessionCore::Verdict verdict = SessionCore::Verdict::kStale;
  std::unique_ptr<PendingCall> answered;
  std::vector<std::stop_source> given_up;
  bool early = false;
  Landing over;  // Let go of without the lock.
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = heard_ = hub_->Now();
    status = core_.OnAcks(prefix.acks, now);
    verdict = core_.OnAnnounced(pipe->id, pipe->lane, prefix.number);
    // An answer that overtakes the end of the one that lands: it comes again when that has ended.
    early = verdict == SessionCore::Verdict::kNew && prefix.what == What::kReply && IsLanding(prefix.call);
    if (status.ok() && verdict == SessionCore::Verdict::kNew && !early) {
      core_.OnReceived(pipe->lane, prefix.number, bytes, (prefix.flags & kFlagAckNow) != 0, now);
      if (prefix.what == What::kReply) answered = calls_.Take(prefix.call);
      if (prefix.what == What::kCancel) given_up = served_.Cancel(prefix.call);
      Landing& landing = landings_[static_cast<size_t>(pipe->lane)];
      if (!landing.busy && landing.number <= prefix.number) over = std::exchange(landing, Landing());
    }
  }
  for (std::stop_source& stop : given_up) stop.request_stop();
  if (!status.ok()) {
    Violation(pipe, status);
    return false;
  }
  if (early) {
    PipeClosed(pipe, absl::AbortedError("an answer came while another one lands"));
    return false;
  }
  switch (verdict) {
    case SessionCore::Verdict::kStale:
      return false;
    case SessionCore::Verdict::kGap:
      TooEarly(pipe, prefix.number);
      return false;
    case SessionCore::Verdict::kDuplicate:
      break;
    case SessionCore::Verdict::kNew:
      if (prefix.what == What::kRequest) RunRequest(header, {}, {}, absl::OkStatus());
      if (answered != nullptr) {
        Complete(std::unique_ptr<ClientCall>(static_cast<ClientCall*>(answered.release())), header, {}, {});
      }
      break;
  }
  return true;
}

bool Session::OnBundle(const PipePtr& pipe, const Header& bundle) {
  for (absl::string_view part : bundle.parts) {
    absl::StatusOr<Header> header = Decode(part, {});
    if (!header.ok()) {
      Violation(pipe, header.status());
      return false;
    }
    if (!OnPlainData(pipe, *header, part.size())) return false;
  }
  return true;
}

void Session::OnTensorData(std::shared_ptr<Incoming> in) {
  const Prefix& prefix = in->header.prefix;
  const Lane lane = in->pipe->lane;
  absl::Status status;
  SessionCore::Verdict verdict = SessionCore::Verdict::kStale;
  bool waits = false;
  std::vector<at::Tensor> over;  // Let go of without the lock.
  {
    absl::MutexLock lock(&mu_);
    heard_ = hub_->Now();
    status = core_.OnAcks(prefix.acks, heard_);
    verdict = core_.OnAnnounced(in->pipe->id, lane, prefix.number);
    Landing& landing = landings_[static_cast<size_t>(lane)];
    if (status.ok() && verdict != SessionCore::Verdict::kStale && verdict != SessionCore::Verdict::kGap) {
      waits = landing.busy;
      landing.busy = true;
      if (waits) {
        // A pipe that was cut still writes into the memory; this one goes on when that has ended.
        landing.waiting = in;
      } else {
        if (verdict == SessionCore::Verdict::kNew && landing.request && landing.number == prefix.number &&
            prefix.what == What::kRequest && CheckMatch(landing.tensors, in->header.tensors, "").ok()) {
          in->tensors = std::move(landing.tensors);
          in->wait = std::move(landing.wait);
          in->streams = std::move(landing.streams);
          in->refusal = landing.refusal;
        }
        over.swap(landing.tensors);
      }
    }
  }
  if (verdict == SessionCore::Verdict::kStale || waits) return Drain();
  if (!status.ok()) return Violation(in->pipe, status);
  if (verdict == SessionCore::Verdict::kGap) return TooEarly(in->pipe, prefix.number);
  const bool repeated = verdict == SessionCore::Verdict::kDuplicate;
  absl::Status streamed = AddStreams(in->header.tensors, &in->streams);
  if (streamed.ok() && in->tensors.empty() && !repeated) PrepareLanding(*in);
  if (in->tensors.empty()) {
    StreamScope scope(in->streams);
    absl::StatusOr<std::vector<at::Tensor>> memory = absl::NotFoundError("nobody waits for it");
    if (streamed.ok() && in->fresh) {
      memory = AllocateFresh(hub_->buffers(), in->header.tensors);
      if (!memory.ok()) GiveUp(prefix.call, memory.status());
    }
    // Nobody wants it: it is read only to get behind it.
    if (!memory.ok()) {
      memory = streamed.ok() ? AllocateUnwanted(hub_->buffers(), in->header.tensors)
                             : absl::StatusOr<std::vector<at::Tensor>>(streamed);
    }
    if (!memory.ok()) {
      OnLanded(in, memory.status());
      return Die(memory.status(), /*notify=*/true, /*quiet=*/false);
    }
    in->tensors = *std::move(memory);
  }
  std::vector<transport::Buffer> buffers = ReadBuffers(in->tensors, in->header.tensors, in->streams);
  std::shared_ptr<transport::Pipe> pipe = in->pipe->pipe;
  pipe->Read(std::move(buffers),
             [self = shared_from_this(), in](const absl::Status& status) { self->OnLanded(in, status); });
  Drain();
}

void Session::PrepareLanding(Incoming& in) {
  const Prefix& prefix = in.header.prefix;
  if (prefix.what == What::kRequest) {
    std::string why;
    std::shared_ptr<const Method> method =
        hub_->FindMethod({std::string(in.header.method), in.header.version}, &why);
    absl::StatusOr<std::vector<at::Tensor>> into = absl::NotFoundError(why);
    absl::StatusOr<std::shared_ptr<BacklogWait>> wait;
    if (hub_->shutting_down()) {
      into = absl::UnavailableError("it is shutting down");
    } else if (method == nullptr) {
      // As it is.
    } else if (wait = JoinBacklog(*method, in.header); !wait.ok()) {
      into = wait.status();
    } else {
      in.wait = *std::move(wait);
      into = AllocateFor(*method, hub_->buffers(), peer().id, in.header.body, in.header.tensors, in.streams);
    }
    if (into.ok()) {
      in.tensors = *std::move(into);
    } else {
      in.refusal = into.status();
    }
    return;
  }
  std::unique_ptr<ClientCall> mismatched;
  absl::Status match;
  {
    absl::MutexLock lock(&mu_);
    auto* call = static_cast<ClientCall*>(calls_.Find(prefix.call));
    // While another answer lands in its memory the call waits for the end of that.
    if (call == nullptr || call->landing) return;
    in.fresh = call->reply_into.empty();
    if (in.fresh) return;
    match = CheckMatch(call->reply_into, in.header.tensors, "reply_into");
    if (match.ok()) {
      call->landing = call->torn = in.into_caller = true;
      in.tensors = call->reply_into;
      if (!call->into_streams.empty()) in.streams = call->into_streams;
    } else {
      mismatched.reset(static_cast<ClientCall*>(calls_.Take(prefix.call).release()));
    }
  }
  if (mismatched == nullptr) return;
  FailLater(std::move(mismatched), match, base::Ran::kYes);
}

// Its answer has come, and cannot be placed.
void Session::GiveUp(uint64_t id, const absl::Status& status) {
  std::unique_ptr<PendingCall> call;
  {
    absl::MutexLock lock(&mu_);
    call = calls_.Take(id);
  }
  if (call != nullptr) FailLater(std::move(call), status, base::Ran::kYes);
}

void Session::OnLanded(const std::shared_ptr<Incoming>& in, const absl::Status& status) {
  const Prefix& prefix = in->header.prefix;
  const Lane lane = in->pipe->lane;
  std::shared_ptr<Incoming> waiting;
  std::unique_ptr<PendingCall> answered, lost;
  Landing over;  // Let go of without the lock.
  bool received = false;
  {
    absl::MutexLock lock(&mu_);
    Landing& landing = landings_[static_cast<size_t>(lane)];
    landing.busy = false;
    waiting = std::move(landing.waiting);
    PendingCall* call = in->into_caller ? calls_.Find(prefix.call) : nullptr;
    if (call != nullptr) call->landing = false;
    if (status.ok()) {
      size_t bytes = in->descriptor.header.size();
      for (const auto& tensor : in->descriptor.tensors) bytes += tensor.bytes;
      received = core_.OnReceived(lane, prefix.number, bytes, true, hub_->Now());
      over = std::exchange(landing, Landing());
      // A session that died meanwhile left this call to us, and it is answered.
      const bool answers = received || (call != nullptr && core_.dead());
      if (answers && prefix.what == What::kReply && !IsLanding(prefix.call))
        answered = calls_.Take(prefix.call);
    } else {
      if (call != nullptr && (call->expired || core_.dead())) lost = calls_.Take(prefix.call);
      if (prefix.what == What::kRequest && !core_.dead() && prefix.number == core_.last_received(lane) + 1) {
        landing.number = prefix.number;
        landing.request = true;
        landing.tensors = in->tensors;
        landing.streams = in->streams;
        landing.refusal = in->refusal;
        landing.wait = in->wait;
      }
    }
  }
  if (received && prefix.what == What::kRequest) {
    RunRequest(in->header, std::move(in->tensors), in->streams, in->refusal, std::move(in->wait));
  }
  if (answered != nullptr) {
    Complete(std::unique_ptr<ClientCall>(static_cast<ClientCall*>(answered.release())), in->header,
             std::move(in->tensors), in->streams);
  }
  if (lost != nullptr) FailLater(std::move(lost), status, base::Ran::kYes);
  if (!status.ok()) {
    PipeClosed(in->pipe, status);
  } else {
    Drain();
    StartRead(in->pipe);
  }
  if (waiting != nullptr) OnTensorData(std::move(waiting));
}

}  // namespace Atoll::rpc
