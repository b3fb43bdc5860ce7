// The private parts of Session, shared by its three .cc files. Internal to rpc.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "atoll/rpc/session.h"

namespace Atoll::rpc {

struct Session::PipeState {
  uint64_t id = 0;
  Lane lane = Lane::kControl;
  bool initiated = false;
  std::shared_ptr<transport::Pipe> pipe;
  std::atomic<bool> greeted{false};
  bool closed = false;  // Under mu_.
};

// A message whose tensors travel on their own, while they do.
struct Session::Incoming {
  PipePtr pipe;
  transport::Descriptor descriptor;
  Header header;  // Views into `descriptor`.
  std::vector<at::Tensor> tensors;
  Streams streams;  // That bring those on GPUs.
  absl::Status refusal;
  bool into_caller = false;  // Written into the caller's reply_into.
  bool fresh = false;        // A reply that is awaited, and lands in memory of ours.
};

// The bytes of requests that wait for a thread to run their handler. A request's share ends with its Wait,
// which may outlive the session.
class Session::Backlog {
 public:
  class Wait {
   public:
    Wait(std::shared_ptr<Backlog> backlog, size_t bytes) : backlog_(std::move(backlog)), bytes_(bytes) {
      backlog_->bytes_.fetch_add(bytes_);
    }
    Wait(Wait&&) noexcept = default;
    Wait& operator=(Wait&&) = delete;
    ~Wait() {
      if (backlog_ != nullptr) backlog_->bytes_.fetch_sub(bytes_);
    }

   private:
    std::shared_ptr<Backlog> backlog_;
    const size_t bytes_;
  };
  size_t bytes() const { return bytes_.load(); }

 private:
  std::atomic<size_t> bytes_{0};
};

struct Session::ClientCall : PendingCall {
  MethodId method;
  OnReply on_reply;
  std::vector<at::Tensor> reply_into;
  Streams into_streams;  // After what the caller's streams held.
  bool reply_inline = false;
};

}  // namespace Atoll::rpc
