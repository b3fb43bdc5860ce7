#include "atoll/transport/pipe.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/transport/pipe_impl.h"

namespace Atoll::transport {
namespace {

constexpr absl::Duration kEndGrace = absl::Milliseconds(100);

/// std::function wants copies.
template <class F>
std::shared_ptr<F> Share(F f) {
  return std::make_shared<F>(std::move(f));
}

}  // namespace

PipeImpl::PipeImpl(std::shared_ptr<const PipeShared> shared, std::shared_ptr<tensorpipe::Pipe> pipe,
                   std::shared_ptr<Link> link)
    : state_(std::make_shared<State>()) {
  state_->shared = std::move(shared);
  state_->pipe = std::move(pipe);
  state_->link = std::move(link);
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
  const DescriptorLimits& limits = state.shared->limits;
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

void PipeImpl::Write(Message message, absl::AnyInvocable<void(absl::Status)> done) {
  if (in_child()) return std::move(done)(state_->shared->fork_mark.Error("Pipe::Write"));
  {
    absl::Status error;
    {
      absl::MutexLock lock(&state_->mu);
      error = state_->error;
    }
    if (!error.ok()) return std::move(done)(std::move(error));
  }
  absl::StatusOr<tensorpipe::Message> converted = Convert(*state_, std::move(message));
  if (!converted.ok()) return std::move(done)(converted.status());
  auto shared = Share(std::move(done));
  try {
    state_->pipe->write(*std::move(converted), [state = state_, shared](const tensorpipe::Error& error) {
      std::move (*shared)(error ? state->Latch(error) : absl::OkStatus());
    });
  } catch (const std::exception& error) {
    // Never for what a peer or a caller does: all of that is checked before.
    ATOLL_LOG(kFatal) << "TensorPipe threw in write: " << error.what();
  }
}

void PipeImpl::OnLoop(absl::AnyInvocable<void()> work) {
  Loop& loop = *state_->shared->engine->loop;
  if (loop.InLoop()) return std::move(work)();
  // TensorPipe runs other pipes' callbacks in whatever thread calls it; they may expect no user's locks.
  loop.Defer(std::move(work));
}

void PipeImpl::ReadDescriptor(absl::AnyInvocable<void(absl::StatusOr<Descriptor>)> done) {
  if (in_child()) return std::move(done)(state_->shared->fork_mark.Error("Pipe::ReadDescriptor"));
  absl::Status refused;
  {
    absl::MutexLock lock(&state_->mu);
    if (state_->reading != State::Reading::kIdle) {
      refused =
          absl::FailedPreconditionError("ReadDescriptor while another read is outstanding or announced");
    } else {
      state_->reading = State::Reading::kDescriptor;
    }
  }
  OnLoop([state = state_, refused = std::move(refused), done = std::move(done)]() mutable {
    if (!refused.ok()) return std::move(done)(std::move(refused));
    auto shared = Share(std::move(done));
    state->pipe->readDescriptor(
        [state, shared](const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) {
          state->OnDescriptor(error, std::move(descriptor), std::move(*shared));
        });
  });
}

void PipeImpl::State::OnDescriptor(const tensorpipe::Error& tensorpipe_error,
                                   tensorpipe::Descriptor descriptor,
                                   absl::AnyInvocable<void(absl::StatusOr<Descriptor>)> done) {
  if (tensorpipe_error) {
    absl::Status status = Latch(tensorpipe_error);
    {
      absl::MutexLock lock(&mu);
      reading = Reading::kIdle;
    }
    return std::move(done)(std::move(status));
  }
  Descriptor result;
  result.header = std::move(descriptor.metadata);
  result.tensors.reserve(descriptor.tensors.size());
  for (const tensorpipe::Descriptor::Tensor& tensor : descriptor.tensors) {
    // The devices were checked before TensorPipe saw them (CheckDescriptor).
    absl::StatusOr<Device> source = FromTensorPipe(tensor.sourceDevice);
    absl::StatusOr<Device> target = FromTensorPipe(*tensor.targetDevice);
    ATOLL_CHECK(source.ok() && target.ok()) << "an unchecked descriptor";
    result.tensors.push_back({tensor.length, *source, *target});
  }
  {
    absl::MutexLock lock(&mu);
    reading = result.tensors.empty() ? Reading::kIdle : Reading::kAnnounced;
    announced = result.tensors;
  }
  // TensorPipe goes on to the next message only once this one has its (empty) allocation.
  if (result.tensors.empty()) pipe->read(tensorpipe::Allocation(), [](const tensorpipe::Error&) {});
  std::move(done)(std::move(result));
}

void PipeImpl::Read(std::vector<Buffer> into, absl::AnyInvocable<void(absl::Status)> done) {
  if (in_child()) return std::move(done)(state_->shared->fork_mark.Error("Pipe::Read"));
  tensorpipe::Allocation allocation;
  absl::Status refused;
  {
    absl::MutexLock lock(&state_->mu);
    if (state_->reading != State::Reading::kAnnounced) {
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
    if (refused.ok()) state_->reading = State::Reading::kTensors;
  }
  OnLoop([state = state_, refused = std::move(refused), allocation = std::move(allocation),
          done = std::move(done)]() mutable {
    if (!refused.ok()) return std::move(done)(std::move(refused));
    auto shared = Share(std::move(done));
    state->pipe->read(std::move(allocation), [state, shared](const tensorpipe::Error& error) {
      absl::Status status = error ? state->Latch(error) : absl::OkStatus();
      {
        absl::MutexLock lock(&state->mu);
        state->reading = State::Reading::kIdle;
      }
      std::move (*shared)(std::move(status));
    });
  });
}

void PipeImpl::Close(absl::Status reason) {
  if (in_child()) return;
  if (reason.ok()) reason = absl::CancelledError("closed");
  (void)state_->Latch(std::move(reason));
  OnLoop([state = state_] { state->pipe->close(); });
}

}  // namespace Atoll::transport
