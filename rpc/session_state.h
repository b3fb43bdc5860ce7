// The private parts of Session, shared by its .cc files. Internal to rpc.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
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

// The bytes of requests that wait for a thread to run their handler.
struct Session::Backlog {
  std::atomic<size_t> bytes{0};
};

// A request's share of it, until this ends; that may be after the session's end.
class Session::BacklogWait {
 public:
  BacklogWait(std::shared_ptr<Backlog> backlog, size_t bytes) : backlog_(std::move(backlog)), bytes_(bytes) {
    backlog_->bytes.fetch_add(bytes_);
  }
  BacklogWait(const BacklogWait&) = delete;
  BacklogWait& operator=(const BacklogWait&) = delete;
  ~BacklogWait() { backlog_->bytes.fetch_sub(bytes_); }

 private:
  const std::shared_ptr<Backlog> backlog_;
  const size_t bytes_;
};

// A message whose tensors travel on their own, while they do.
struct Session::Incoming {
  PipePtr pipe;
  transport::Descriptor descriptor;
  Header header;  // Views into `descriptor`.
  std::vector<at::Tensor> tensors;
  Streams streams;  // That bring those on GPUs.
  absl::Status refusal;
  bool into_caller = false;           // Written into the caller's reply_into.
  std::shared_ptr<BacklogWait> wait;  // Of a request.
  bool fresh = false;                 // A reply that is awaited, and lands in memory of ours.
};

struct Session::ClientCall : PendingCall {
  MethodId method;
  absl::Duration timeout;
  OnReply on_reply;
  std::vector<at::Tensor> reply_into;
  Streams into_streams;  // After what the caller's streams held.
  bool reply_inline = false;
  std::optional<std::stop_callback<std::function<void()>>> on_stop;
};

}  // namespace Atoll::rpc
