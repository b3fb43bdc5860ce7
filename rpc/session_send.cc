// Session: messages out.
//
//   Post, Start ── alone: Drain ──────────────────────────────┐
//        └──────── in a burst: Drain on the loop, once ───────┴─> Execute ── a message
//                                                            └─> WriteBundle ── small ones that follow each other
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "atoll/base/log.h"
#include "atoll/rpc/session_state.h"
#include "atoll/rpc/user_code.h"

namespace Atoll::rpc {
namespace {

// A burst: behind one message so many more, each so soon after the one before.
constexpr int kBurst = 2;
constexpr absl::Duration kBurstGap = absl::Microseconds(20);

}  // namespace

absl::Status Session::Post(OutMessagePtr message, bool force) {
  const bool small = static_cast<const Message&>(*message).buffers.empty();
  absl::Status status;
  bool at_once = false;
  {
    absl::MutexLock lock(&mu_);
    const absl::Time now = hub_->Now();
    status = core_.Post(std::move(message), now, force);
    at_once = !InBurst(now) || !small;
  }
  if (status.ok()) {
    Flush(at_once);
  } else {
    Drain();  // It may have been the end of the session.
  }
  return status;
}

bool Session::InBurst(absl::Time now) {
  burst_ = now - posted_ < kBurstGap ? std::min(burst_ + 1, kBurst) : 0;
  posted_ = now;
  return burst_ == kBurst;
}

// Alone, a message leaves from the thread that posted it, without a hop. Those of a burst wait for the loop, which
// sends as one what has gathered when it comes to it: what a message costs below is much more than its bytes.
void Session::Flush(bool at_once) {
  if (at_once) return Drain();
  {
    absl::MutexLock lock(&mu_);
    if (draining_ || deferred_) return;  // Whoever drains takes it too.
    deferred_ = true;
  }
  hub_->endpoint()->Defer([self = shared_from_this()] {
    {
      absl::MutexLock lock(&self->mu_);
      self->deferred_ = false;
    }
    self->Drain();
  });
}

// What the core asks for.

void Session::Drain() {
  absl::Time arm = absl::InfiniteFuture();
  std::vector<PipePtr> pipes;
  mu_.Lock();
  if (!draining_) {
    draining_ = true;
    while (core_.has_actions()) {
      std::vector<SessionCore::Action> actions = core_.TakeActions();
      pipes.clear();
      for (const SessionCore::Action& action : actions) {
        auto found = pipes_.find(action.pipe);
        pipes.push_back(found == pipes_.end() ? nullptr : found->second);
      }
      mu_.Unlock();
      for (size_t i = 0; i < actions.size();) {
        const size_t small = CountSmall(absl::MakeSpan(actions).subspan(i), absl::MakeSpan(pipes).subspan(i));
        if (small > 1) {
          WriteBundle(pipes[i], absl::MakeSpan(actions).subspan(i, small));
        } else {
          Execute(actions[i], pipes[i]);
        }
        i += std::max<size_t>(small, 1);
      }
      actions.clear();
      mu_.Lock();
    }
    draining_ = false;
  }
  absl::Time next = std::min(core_.NextTimer(), calls_.NextDeadline());
  if ((timers_.empty() || next < *timers_.begin()) && next != absl::InfiniteFuture()) {
    timers_.insert(next);
    arm = next;
  }
  mu_.Unlock();
  if (arm != absl::InfiniteFuture()) {
    hub_->At(arm, [weak = weak_from_this(), arm] {
      if (auto self = weak.lock()) self->OnTimer(arm);
    });
  }
}

void Session::Execute(SessionCore::Action& action, const PipePtr& pipe) {
  using Kind = SessionCore::Action::Kind;
  transport::Message out;
  switch (action.kind) {
    case Kind::kConnect:
      Connect(action.lane, action.attempt);
      return;
    case Kind::kHello:
      if (pipe == nullptr) return;
      action.hello.addresses = hub_->endpoint()->addresses();
      action.hello.device_map = DestinationOf(/*reply=*/false).map;
      action.hello.limits = hub_->limits();
      out.header = EncodeHello(action.hello);
      SetAcks(out.header.data(), action.acks);
      Write(pipe, std::move(out));
      return;
    case Kind::kWrite:
      if (pipe != nullptr) WriteData(pipe, action);
      return;
    case Kind::kAck:
      if (pipe == nullptr) return;
      out.header =
          EncodeBare(Atoll::rpc::Kind::kAck, What::kNothing, 0, action.open_bulk ? kFlagOpenBulk : 0);
      SetAcks(out.header.data(), action.acks);
      Write(pipe, std::move(out));
      return;
    case Kind::kBye:
      if (pipe == nullptr) return;
      out.header = EncodeBare(Atoll::rpc::Kind::kBye, What::kNothing);
      Write(pipe, std::move(out));
      return;
    case Kind::kClose:
      if (pipe != nullptr) PipeClosed(pipe, action.status);
      return;
    case Kind::kAcked:
      if (auto* message = static_cast<Message*>(action.message.get());
          message != nullptr && message->on_received) {
        CallbackExecutor(hub_->executor(), kOnReceived)
            .Schedule(std::exchange(message->on_received, nullptr));
      }
      return;
    case Kind::kDropped:
      return;  // Its end returns its loans: here, where no lock is held.
    case Kind::kDead:
      Finish(action.status);
      return;
  }
}

void Session::Write(const PipePtr& pipe, transport::Message message) {
  pipe->pipe->Write(std::move(message), [self = shared_from_this(), pipe](const absl::Status& status) {
    if (!status.ok()) self->PipeClosed(pipe, status);
  });
}

void Session::WriteData(const PipePtr& pipe, SessionCore::Action& action) {
  auto message = std::static_pointer_cast<Message>(std::move(action.message));
  absl::Status sendable = message == nullptr ? absl::OkStatus() : CheckSendable(*message, pipe);
  if (!sendable.ok()) Reject(*message, sendable);
  // The number of what is not sent any more leaves no gap.
  if (message == nullptr || !sendable.ok()) {
    return WriteNumber(pipe, action.number, action.acks, action.ack_now);
  }
  message->written = true;
  transport::Message out;
  out.header = message->header;
  out.tensors = message->buffers;
  out.targets = message->targets;
  if (message->deadline != absl::InfiniteFuture())
    SetTimeout(out.header.data(), message->deadline - hub_->Now());
  SetAcks(out.header.data(), action.acks);
  SetNumber(out.header.data(), action.number, action.ack_now);
  pipe->pipe->Write(std::move(out),
                    [self = shared_from_this(), pipe, message, number = action.number, acks = action.acks,
                     ack_now = action.ack_now](const absl::Status& status) {
                      if (status.ok()) return;
                      if (!transport::IsMessageError(status)) return self->PipeClosed(pipe, status);
                      self->Reject(*message, status);
                      self->WriteNumber(pipe, number, acks, ack_now);
                      self->Drain();  // What stands for it.
                    });
}

void Session::WriteNumber(const PipePtr& pipe, uint64_t number, const Acks& acks, bool ack_now) {
  transport::Message out;
  out.header = EncodeBare(Kind::kData, What::kNothing);
  SetAcks(out.header.data(), acks);
  SetNumber(out.header.data(), number, ack_now);
  Write(pipe, std::move(out));
}

// How many of `actions`, from the first one, go as one message: small ones of one pipe.
size_t Session::CountSmall(absl::Span<const SessionCore::Action> actions, absl::Span<const PipePtr> pipes) {
  size_t count = 0;
  size_t bytes = kPrefixBytes + sizeof(uint32_t);
  for (; count < actions.size() && pipes[count] != nullptr && pipes[count] == pipes[0]; ++count) {
    const SessionCore::Action& action = actions[count];
    if (action.kind != SessionCore::Action::Kind::kWrite || action.message == nullptr) break;
    const auto& message = static_cast<const Message&>(*action.message);
    bytes += sizeof(uint32_t) + message.header.size();
    if (!message.buffers.empty() || bytes > kMaxBundleBytes) break;
  }
  return count;
}

void Session::WriteBundle(const PipePtr& pipe, absl::Span<SessionCore::Action> actions) {
  BundleWriter bundle;
  const absl::Time now = hub_->Now();
  for (const SessionCore::Action& action : actions) {
    auto& message = static_cast<Message&>(*action.message);
    message.written = true;
    char* header = bundle.Add(message.header);
    if (message.deadline != absl::InfiniteFuture()) SetTimeout(header, message.deadline - now);
    SetAcks(header, action.acks);
    SetNumber(header, action.number, action.ack_now);
  }
  transport::Message out;
  out.header = std::move(bundle).Take();
  Write(pipe, std::move(out));
}

// What stands in the way of a message alone: a limit or a device that the peer does not have.
absl::Status Session::CheckSendable(const Message& message, const PipePtr& pipe) const {
  transport::MessageLimits limits;
  {
    absl::MutexLock lock(&mu_);
    limits = peer_limits_;
  }
  ATOLL_RETURN_IF_ERROR(CheckLimits(message, limits));
  for (size_t i = 0; i < message.targets.size(); ++i) {
    if (pipe->pipe->Reaches(message.buffers[i].device, message.targets[i])) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("tensor ", i, " of those that travel on their own is on ",
                     FromTransport(message.buffers[i].device).str(), ", from where no channel leads to ",
                     FromTransport(message.targets[i]).str(), " of the receiver"));
  }
  return absl::OkStatus();
}

// It will not be sent, or not again: its call fails, or gets an error for a reply.
void Session::Reject(Message& message, const absl::Status& status) {
  std::unique_ptr<PendingCall> failed;
  // Over a pipe before this one it may have arrived.
  const base::Ran ran =
      message.written && !transport::IsMessageError(status) ? base::Ran::kMaybe : base::Ran::kNo;
  const uint64_t id = CallOf(message.header);
  const bool reply = WhatOf(message.header) == What::kReply;
  {
    absl::MutexLock lock(&mu_);
    core_.Withdraw(&message, hub_->Now());
    if (reply) {
      auto answer = MakeMessage(EncodeErrorReply(base::Annotate(status, "its reply"), base::Ran::kYes));
      SetCall(answer->header.data(), id, 0);
      core_.Post(std::move(answer), hub_->Now(), /*force=*/true).IgnoreError();
    } else if (WhatOf(message.header) == What::kRequest) {
      failed = calls_.Take(id);
      if (failed != nullptr && ran != base::Ran::kNo) {
        auto cancel = MakeMessage(EncodeBare(Kind::kData, What::kCancel, id));
        core_.Post(std::move(cancel), hub_->Now(), /*force=*/true).IgnoreError();
      }
    }
  }
  if (failed == nullptr) return;
  FailLater(std::move(failed), status, ran);
}

}  // namespace Atoll::rpc
