// The loop of an endpoint and what it counts: shared by every object that lives on it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "atoll/transport/loop.h"

namespace Atoll::transport {

/// Counted by everything that touches sockets.
struct Traffic {
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> authenticated{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<int> lingering{0};  ///< Closed sockets whose last bytes are still on their way.
};

/// Held by shared_ptr by the endpoint and by each stream, so that a late callback finds the loop. The
/// endpoint stops and joins the loop.
struct Engine {
  std::unique_ptr<Loop> loop;
  Traffic traffic;
  /// Drops the oldest stranger at the door for the descriptor; false if there is none. Loop only.
  std::function<bool()> make_room = [] { return false; };
  /// Calls into TensorPipe that a user of a pipe makes on the loop at this moment. TensorPipe runs whatever
  /// is due inside them, and the user may hold locks. Loop only.
  int users_calls = 0;
};

}  // namespace Atoll::transport
