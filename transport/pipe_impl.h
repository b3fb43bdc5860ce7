// Pipe over TensorPipe's pipe.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/fork.h"
#include "atoll/transport/cuda_plugin.h"
#include "atoll/transport/engine.h"
#include "atoll/transport/frame_check.h"
#include "atoll/transport/link.h"
#include "atoll/transport/pipe.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::transport {

/// What all pipes of an endpoint share. Constant.
struct PipeShared {
  base::ForkMark fork_mark;
  std::shared_ptr<Engine> engine;
  DescriptorLimits limits;
  CudaPlugin* cuda = nullptr;
  std::string no_cuda;  ///< Why `cuda` is null.
};

class PipeImpl final : public Pipe {
 public:
  PipeImpl(std::shared_ptr<const PipeShared> shared, std::shared_ptr<tensorpipe::Pipe> pipe,
           std::shared_ptr<Link> link);
  ~PipeImpl() override;

  void Write(Message message, absl::AnyInvocable<void(absl::Status)> done) override;
  void ReadDescriptor(absl::AnyInvocable<void(absl::StatusOr<Descriptor>)> done) override;
  void Read(std::vector<Buffer> into, absl::AnyInvocable<void(absl::Status)> done) override;
  void Close(absl::Status reason) override;
  const PeerInfo& peer() const override { return state_->link->peer(); }
  bool Reaches(Device ours, Device theirs) const override {
    return !in_child() && state_->link->pairs().Has(ours, theirs);
  }

 private:
  /// What callbacks hold: dropping the pipe must not wait for them. TensorPipe's pipe is in it because a
  /// callback goes on with it; the destructor closes it, which ends all callbacks.
  struct State {
    std::shared_ptr<const PipeShared> shared;
    std::shared_ptr<tensorpipe::Pipe> pipe;
    std::shared_ptr<Link> link;

    absl::Mutex mu;
    absl::Status error ABSL_GUARDED_BY(mu);  // The first one.
    enum class Reading {
      kIdle,
      kDescriptor,
      kAnnounced,
      kTensors
    } reading ABSL_GUARDED_BY(mu) = Reading::kIdle;
    std::vector<Descriptor::Tensor> announced ABSL_GUARDED_BY(mu);

    /// The status to report for TensorPipe's `error`: the first failure of the pipe.
    absl::Status Latch(const tensorpipe::Error& error);
    absl::Status Latch(absl::Status status);
    /// The first connection has ended: ends the pipe unless tensors are still to be read.
    void EndIfWaiting(const absl::Status& status);
    absl::StatusOr<tensorpipe::Buffer> Wrap(const Buffer& buffer) const;
    void OnDescriptor(const tensorpipe::Error& error, tensorpipe::Descriptor descriptor,
                      absl::AnyInvocable<void(absl::StatusOr<Descriptor>)> done);
  };

  static absl::StatusOr<tensorpipe::Message> Convert(const State& state, Message message);
  void OnLoop(absl::AnyInvocable<void()> work);
  bool in_child() const { return state_->shared->fork_mark.in_child(); }

  const std::shared_ptr<State> state_;
};

}  // namespace Atoll::transport
