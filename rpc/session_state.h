// The private parts of Session, shared by its three .cc files. Internal to rpc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "atoll/rpc/session.h"

namespace Atoll::rpc {

struct Session::PipeState {
  uint64_t id = 0;
  Lane lane = Lane::kControl;
  bool initiated = false;
  std::shared_ptr<transport::Pipe> pipe;
  bool greeted = false;  // Of its read chain.
  bool closed = false;   // Under mu_.
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
};

struct Session::ClientCall : PendingCall {
  MethodId method;
  OnReply on_reply;
  std::vector<at::Tensor> reply_into;
  Streams into_streams;  // After what the caller's streams held.
  bool reply_inline = false;
};

}  // namespace Atoll::rpc
