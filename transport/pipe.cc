#include "atoll/transport/pipe.h"

#include <exception>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/transport/pipe_impl.h"

namespace Atoll::transport {
namespace {

constexpr absl::Duration kEndGrace = absl::Milliseconds(100);
constexpr char kMessageErrorUrl[] = "atoll/message";

/// Around a user's call into TensorPipe.
class UsersCall {
 public:
  explicit UsersCall(Engine& engine) : count_(engine.loop->InLoop() ? &engine.users_calls : nullptr) {
    if (count_ != nullptr) ++*count_;
  }
  ~UsersCall() {
    if (count_ != nullptr) --*count_;
  }
  UsersCall(const UsersCall&) = delete;

 private:
  int* const count_;
};

}  // namespace

bool IsMessageError(const absl::Status& status) { return status.GetPayload(kMessageErrorUrl).has_value(); }

absl::Status MessageError(absl::Status status) {
  status.SetPayload(kMessageErrorUrl, absl::Cord());
  return status;
}

void PipeList::Add(const std::shared_ptr<Entry>& entry) {
  absl::MutexLock lock(&mu_);
  entries_[entry.get()] = entry;
}

void PipeList::Remove(Entry* entry) {
  absl::MutexLock lock(&mu_);
  entries_.erase(entry);
}

void PipeList::GiveUpOnLoop(const absl::Status& status) {
  std::vector<std::shared_ptr<Entry>> entries;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [key, weak] : entries_) {
      if (auto entry = weak.lock()) entries.push_back(std::move(entry));
    }
  }
  for (const std::shared_ptr<Entry>& entry : entries) entry->GiveUpOnLoop(status);
}

PipeImpl::PipeImpl(std::shared_ptr<const PipeShared> shared, std::shared_ptr<tensorpipe::Pipe> pipe,
                   std::shared_ptr<Link> link)
    : state_(std::make_shared<State>()) {
  state_->shared = std::move(shared);
  state_->pipe = std::move(pipe);
  state_->link = std::move(link);
  state_->shared->pipes->Add(state_);
  // TensorPipe learns of an end from the operation that it fails, and has none outstanding while a pipe
  // is still being established: then the pipe would wait for ever.
  state_->link->OnEnded([weak = std::weak_ptr<State>(state_)](absl::Status status) {
    auto state = weak.lock();
    if (state == nullptr) return;
    Loop& loop = *state->shared->engine->loop;
    loop.Defer([weak, status, &loop] {
      // Not at once: a message that has arrived whole may still be on its way through TensorPipe.
      loop.At(loop.Now() + kEndGrace, [weak, status] {
        auto state = weak.lock();
        if (state != nullptr) state->EndIfWaiting(status);
      });
    });
  });
  // While one is being established, nothing reads what came behind the brochure: its end is not seen by reading.
  state_->link->OnHungUp([weak = std::weak_ptr<State>(state_)] {
    if (auto state = weak.lock()) state->WatchHungUp();
  });
}

void PipeImpl::State::WatchHungUp() {
  {
    absl::MutexLock lock(&mu);
    if (up) return;
  }
  shared->engine->loop->Defer([weak = weak_from_this(), loop = shared->engine->loop.get()] {
    // Not at once: its further connections may lie at the door, whole, though it has hung up.
    loop->At(loop->Now() + kEndGrace, [weak] {
      if (auto state = weak.lock()) state->EndIfNotUp();
    });
  });
}

void PipeImpl::State::EndIfNotUp() {
  {
    absl::MutexLock lock(&mu);
    if (up || (reading != Reading::kDescriptor && writes.empty())) return;
  }
  (void)Latch(absl::UnavailableError("the peer closed the pipe before all its connections were there"));
  pipe->close();
}

PipeImpl::~PipeImpl() {
  if (in_child()) {
    base::Abandon(std::shared_ptr<State>(state_));
    return;
  }
  Close(absl::CancelledError("the pipe was dropped"));
}

void PipeImpl::State::EndIfWaiting(const absl::Status& status) {
  {
    absl::MutexLock lock(&mu);
    if (reading == Reading::kAnnounced || reading == Reading::kTensors) return;  // Its tensors may be here.
  }
  (void)Latch(status);
  pipe->close();
}

absl::Status PipeImpl::State::Latch(absl::Status status) {
  absl::MutexLock lock(&mu);
  if (error.ok()) error = base::Annotate(status, link->peer().member.ToString());
  return error;
}

absl::Status PipeImpl::State::Latch(const tensorpipe::Error& tensorpipe_error) {
  return Latch(FromError(tensorpipe_error));
}

absl::StatusOr<tensorpipe::Buffer> PipeImpl::State::Wrap(const Buffer& buffer) const {
  if (buffer.device.kind == Device::Kind::kCpu) return tensorpipe::Buffer(tensorpipe::CpuBuffer{buffer.data});
  if (shared->cuda == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("a CUDA buffer, but ", shared->no_cuda));
  }
  return shared->cuda->Wrap(buffer);
}

absl::StatusOr<tensorpipe::Message> PipeImpl::Convert(const State& state, Message message) {
  const MessageLimits& limits = state.shared->limits;
  if (message.header.size() > limits.max_header_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a header of ", message.header.size(),
                                                   " bytes, above the limit of ", limits.max_header_bytes));
  }
  if (message.tensors.size() > limits.max_tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(message.tensors.size(), " tensors, above the limit of ", limits.max_tensors));
  }
  if (!message.targets.empty() && message.targets.size() != message.tensors.size()) {
    return absl::InvalidArgumentError("as many targets as tensors, or none");
  }
  tensorpipe::Message converted;
  converted.metadata = std::move(message.header);
  converted.tensors.resize(message.tensors.size());
  const DevicePairs pairs = message.tensors.empty() ? DevicePairs() : state.link->pairs();
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    const Buffer& buffer = message.tensors[i];
    const Device target = message.targets.empty() ? Device{} : message.targets[i];
    if (buffer.bytes > limits.max_tensor_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("a tensor of ", buffer.bytes, " bytes, above the limit of ", limits.max_tensor_bytes));
    }
    absl::StatusOr<tensorpipe::Buffer> wrapped = state.Wrap(buffer);
    if (!wrapped.ok()) return wrapped.status();
    if (!pairs.Has(buffer.device, target)) {
      return absl::FailedPreconditionError(absl::StrCat("no channel leads from our ",
                                                        DeviceName(buffer.device), " to ", DeviceName(target),
                                                        " of ", state.link->peer().member.ToString()));
    }
    converted.tensors[i].buffer = *std::move(wrapped);
    converted.tensors[i].length = buffer.bytes;
    converted.tensors[i].targetDevice = ToTensorPipe(target);
  }
  return converted;
}

PipeImpl::WriteDone PipeImpl::State::TakeWrite(uint64_t id, bool succeeded) {
  absl::MutexLock lock(&mu);
  auto found = writes.find(id);
  if (found == writes.end()) return nullptr;
  WriteDone done = std::move(found->second);
  writes.erase(found);
  if (succeeded) up = true;
  return done;
}

void PipeImpl::Write(Message message, absl::AnyInvocable<void(absl::Status)> done) {
  if (in_child()) return std::move(done)(state_->shared->fork_mark.Error("Pipe::Write"));
  absl::StatusOr<tensorpipe::Message> converted = Convert(*state_, std::move(message));
  if (!converted.ok()) return std::move(done)(MessageError(converted.status()));
  uint64_t id = 0;
  absl::Status error;
  {
    absl::MutexLock lock(&state_->mu);
    error = state_->error;
    if (error.ok()) {
      id = state_->next_write++;
      state_->writes.emplace(id, std::move(done));
    }
  }
  if (!error.ok()) return std::move(done)(std::move(error));
  try {
    UsersCall users_call(*state_->shared->engine);
    state_->pipe->write(*std::move(converted), [state = state_, id](const tensorpipe::Error& error) {
      WriteDone done = state->TakeWrite(id, /*succeeded=*/!error);
      if (done) std::move(done)(error ? state->Latch(error) : absl::OkStatus());
    });
  } catch (...) {
    // Never for what a peer or a caller sends: all of that is checked before. What threw may be a callback of
    // another pipe, which TensorPipe ran here. The loop tells the endpoint, as if it had been thrown there.
    state_->shared->engine->loop->Defer(
        [error = std::current_exception()] { std::rethrow_exception(error); });
    WriteDone left = state_->TakeWrite(id, /*succeeded=*/false);
    if (left) std::move(left)(state_->Latch(absl::InternalError("TensorPipe threw in write")));
  }
  if (state_->link->hung_up()) state_->WatchHungUp();
}

void PipeImpl::State::CallOnLoop(absl::AnyInvocable<void()> call) {
  Engine& engine = *shared->engine;
  // TensorPipe runs other pipes' callbacks in whatever thread calls it, and they may expect no user's locks.
  if (!engine.loop->InLoop()) return engine.loop->Defer(std::move(call));
  UsersCall users_call(engine);
  std::move(call)();
}

bool PipeImpl::State::MayCallBack() const {
  return shared->engine->loop->InLoop() && shared->engine->users_calls == 0;
}

void PipeImpl::ReadDescriptor(absl::AnyInvocable<void(absl::StatusOr<Descriptor>)> done) {
  if (in_child()) return std::move(done)(state_->shared->fork_mark.Error("Pipe::ReadDescriptor"));
  absl::Status refused;
  {
    absl::MutexLock lock(&state_->mu);
    if (state_->given_up) {
      refused = state_->error;
    } else if (state_->reading != State::Reading::kIdle) {
      refused =
          absl::FailedPreconditionError("ReadDescriptor while another read is outstanding or announced");
    } else {
      state_->reading = State::Reading::kDescriptor;
      state_->descriptor_done = std::move(done);
    }
  }
  if (!refused.ok()) {
    state_->shared->engine->loop->Defer(
        [done = std::move(done), refused]() mutable { std::move(done)(refused); });
    return;
  }
  state_->CallOnLoop([state = state_] {
    state->pipe->readDescriptor([state](const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) {
      state->OnDescriptor(error, std::move(descriptor));
    });
  });
  if (state_->link->hung_up()) state_->WatchHungUp();
}

void PipeImpl::State::OnDescriptor(const tensorpipe::Error& tensorpipe_error,
                                   tensorpipe::Descriptor descriptor) {
  absl::StatusOr<Descriptor> result = Descriptor();
  if (tensorpipe_error) {
    result = Latch(tensorpipe_error);
  } else {
    result->header = std::move(descriptor.metadata);
    result->tensors.reserve(descriptor.tensors.size());
    for (const tensorpipe::Descriptor::Tensor& tensor : descriptor.tensors) {
      // The devices were checked before TensorPipe saw them (CheckDescriptor).
      absl::StatusOr<Device> source = FromTensorPipe(tensor.sourceDevice);
      absl::StatusOr<Device> target = FromTensorPipe(*tensor.targetDevice);
      ATOLL_CHECK(source.ok() && target.ok()) << "an unchecked descriptor";
      result->tensors.push_back({tensor.length, *source, *target});
    }
  }
  DescriptorDone done;
  {
    absl::MutexLock lock(&mu);
    if (given_up) return;
    up |= result.ok();
    const bool announces = result.ok() && !result->tensors.empty();
    reading = announces ? Reading::kAnnounced : Reading::kIdle;
    if (announces) announced = result->tensors;
    done = std::exchange(descriptor_done, nullptr);
  }
  // TensorPipe goes on to the next message only once this one has its (empty) allocation.
  if (result.ok() && result->tensors.empty()) {
    pipe->read(tensorpipe::Allocation(), [](const tensorpipe::Error&) {});
  }
  if (MayCallBack()) return std::move(done)(std::move(result));
  shared->engine->loop->Defer(
      [done = std::move(done), result = std::move(result)]() mutable { std::move(done)(std::move(result)); });
}

void PipeImpl::Read(std::vector<Buffer> into, absl::AnyInvocable<void(absl::Status)> done) {
  if (in_child()) return std::move(done)(state_->shared->fork_mark.Error("Pipe::Read"));
  tensorpipe::Allocation allocation;
  absl::Status refused;
  {
    absl::MutexLock lock(&state_->mu);
    if (state_->given_up) {
      refused = state_->error;
    } else if (state_->reading != State::Reading::kAnnounced) {
      refused = absl::FailedPreconditionError("Read without a descriptor that announced tensors");
    } else if (into.size() != state_->announced.size()) {
      refused = absl::InvalidArgumentError(absl::StrCat(state_->announced.size(), " tensors are announced, ",
                                                        into.size(), " buffers were given"));
    }
    for (size_t i = 0; refused.ok() && i < into.size(); ++i) {
      if (into[i].bytes != state_->announced[i].bytes || !(into[i].device == state_->announced[i].target)) {
        refused = absl::InvalidArgumentError(
            absl::StrCat("tensor ", i, " has ", state_->announced[i].bytes, " bytes for ",
                         DeviceName(state_->announced[i].target), ", its buffer ", into[i].bytes, " on ",
                         DeviceName(into[i].device)));
        break;
      }
      absl::StatusOr<tensorpipe::Buffer> wrapped = state_->Wrap(into[i]);
      if (!wrapped.ok()) {
        refused = wrapped.status();
        break;
      }
      allocation.tensors.push_back({*std::move(wrapped)});
    }
    if (refused.ok()) {
      state_->reading = State::Reading::kTensors;
      state_->read_done = std::move(done);
    }
  }
  if (!refused.ok()) {
    state_->shared->engine->loop->Defer(
        [done = std::move(done), refused]() mutable { std::move(done)(refused); });
    return;
  }
  state_->CallOnLoop([state = state_, allocation = std::move(allocation)]() mutable {
    state->pipe->read(std::move(allocation),
                      [state](const tensorpipe::Error& error) { state->OnRead(error); });
  });
}

void PipeImpl::State::OnRead(const tensorpipe::Error& tensorpipe_error) {
  absl::Status status = tensorpipe_error ? Latch(tensorpipe_error) : absl::OkStatus();
  ReadDone done;
  {
    absl::MutexLock lock(&mu);
    if (given_up) return;
    reading = Reading::kIdle;
    done = std::exchange(read_done, nullptr);
  }
  if (MayCallBack()) return std::move(done)(std::move(status));
  shared->engine->loop->Defer(
      [done = std::move(done), status = std::move(status)]() mutable { std::move(done)(status); });
}

void PipeImpl::State::GiveUpOnLoop(const absl::Status& status) {
  const absl::Status reason = Latch(status);
  std::unordered_map<uint64_t, WriteDone> failed_writes;
  DescriptorDone failed_descriptor;
  ReadDone failed_read;
  {
    absl::MutexLock lock(&mu);
    given_up = true;
    failed_writes.swap(writes);
    failed_descriptor = std::exchange(descriptor_done, nullptr);
    failed_read = std::exchange(read_done, nullptr);
  }
  // Each by itself: one that throws must not take the others with it.
  Loop& loop = *shared->engine->loop;
  for (auto& [id, done] : failed_writes) {
    loop.Defer([done = std::move(done), reason]() mutable { std::move(done)(reason); });
  }
  if (failed_descriptor) {
    loop.Defer([done = std::move(failed_descriptor), reason]() mutable { std::move(done)(reason); });
  }
  if (failed_read) loop.Defer([done = std::move(failed_read), reason]() mutable { std::move(done)(reason); });
}

void PipeImpl::Close(absl::Status reason) {
  if (in_child()) return;
  if (reason.ok()) reason = absl::CancelledError("closed");
  (void)state_->Latch(std::move(reason));
  state_->CallOnLoop([state = state_] { state->pipe->close(); });
}

}  // namespace Atoll::transport
