// Pipe over TensorPipe's pipe.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
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

/// The living pipes of an endpoint, for when TensorPipe is broken and ends none of them. Thread-safe.
class PipeList {
 public:
  class Entry {
   public:
    virtual ~Entry() = default;
    /// Ends the pipe without TensorPipe: outstanding and later operations fail with `status`.
    virtual void GiveUpOnLoop(const absl::Status& status) = 0;
  };
  void Add(const std::shared_ptr<Entry>& entry);
  void Remove(Entry* entry);
  void GiveUpOnLoop(const absl::Status& status);

 private:
  absl::Mutex mu_;
  std::map<Entry*, std::weak_ptr<Entry>> entries_ ABSL_GUARDED_BY(mu_);
};

/// What all pipes of an endpoint share. Constant.
struct PipeShared {
  base::ForkMark fork_mark;
  std::shared_ptr<Engine> engine;
  MessageLimits limits;
  CudaPlugin* cuda = nullptr;
  std::string no_cuda;  ///< Why `cuda` is null.
  const std::unique_ptr<PipeList> pipes = std::make_unique<PipeList>();
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
  /// What lies beneath, for benches: they drive it instead of this, which must outlive that.
  const std::shared_ptr<tensorpipe::Pipe>& tensorpipe_pipe() const { return state_->pipe; }

 private:
  using WriteDone = absl::AnyInvocable<void(absl::Status)>;
  using DescriptorDone = absl::AnyInvocable<void(absl::StatusOr<Descriptor>)>;
  using ReadDone = absl::AnyInvocable<void(absl::Status)>;

  /// What callbacks hold: dropping the pipe must not wait for them. TensorPipe's pipe is in it because a
  /// callback goes on with it; the destructor closes it, which ends all callbacks.
  struct State final : PipeList::Entry, std::enable_shared_from_this<State> {
    ~State() override { shared->pipes->Remove(this); }

    std::shared_ptr<const PipeShared> shared;
    std::shared_ptr<tensorpipe::Pipe> pipe;
    std::shared_ptr<Link> link;

    absl::Mutex mu;
    absl::Status error ABSL_GUARDED_BY(mu);  // The first one.
    bool given_up ABSL_GUARDED_BY(mu) = false;
    bool up ABSL_GUARDED_BY(mu) = false;  // All its connections are there: something has come through.
    enum class Reading {
      kIdle,
      kDescriptor,
      kAnnounced,
      kTensors
    } reading ABSL_GUARDED_BY(mu) = Reading::kIdle;
    std::vector<Descriptor::Tensor> announced ABSL_GUARDED_BY(mu);
    // The outstanding callbacks. Who takes one out runs it: TensorPipe's, or GiveUpOnLoop.
    std::unordered_map<uint64_t, WriteDone> writes ABSL_GUARDED_BY(mu);
    uint64_t next_write ABSL_GUARDED_BY(mu) = 1;
    DescriptorDone descriptor_done ABSL_GUARDED_BY(mu);
    ReadDone read_done ABSL_GUARDED_BY(mu);

    /// The status to report for TensorPipe's `error`: the first failure of the pipe.
    absl::Status Latch(const tensorpipe::Error& error);
    absl::Status Latch(absl::Status status);
    /// The first connection has ended: ends the pipe unless tensors are still to be read.
    void EndIfWaiting(const absl::Status& status);
    /// The peer has hung up the first connection: in a while ends the pipe if it is not up and somebody waits for it.
    void WatchHungUp();
    void EndIfNotUp();
    void GiveUpOnLoop(const absl::Status& status) override;
    absl::StatusOr<tensorpipe::Buffer> Wrap(const Buffer& buffer) const;
    /// Calls into TensorPipe on the loop.
    void CallOnLoop(absl::AnyInvocable<void()> call);
    /// Whether a user's callback may run here and now: on the loop, and not inside a user's call.
    bool MayCallBack() const;
    /// Null if it is gone already.
    WriteDone TakeWrite(uint64_t id, bool succeeded);
    void OnDescriptor(const tensorpipe::Error& error, tensorpipe::Descriptor descriptor);
    void OnRead(const tensorpipe::Error& error);
  };

  static absl::StatusOr<tensorpipe::Message> Convert(const State& state, Message message);
  bool in_child() const { return state_->shared->fork_mark.in_child(); }

  const std::shared_ptr<State> state_;
};

}  // namespace Atoll::transport
