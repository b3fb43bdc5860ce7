// What the tests of SessionCore share.
#pragma once

#include <string>
#include <utility>

#include "atoll/rpc/session_core.h"

namespace Atoll::rpc {

struct TestMessage : OutMessage {
  TestMessage(transport::Lane lane, size_t bytes, std::string text_in, bool ack_now = false)
      : OutMessage(lane, bytes, ack_now), text(std::move(text_in)) {}
  std::string text;
};

inline SessionCore::Options Defaults() {
  SessionCore::Options options;
  options.window_bytes = 1000;
  options.queue_bytes = 10000;
  return options;
}

}  // namespace Atoll::rpc
