// The end of a socket whose last bytes should arrive.
#pragma once

#include <memory>

#include "atoll/transport/engine.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport {

/// Keeps a closed socket until the peer has read what we sent, at most a second: closing with unread input would
/// reset the connection and destroy it. On the loop, which outlives it and holds it.
class Lingerer : public Loop::Handler, public std::enable_shared_from_this<Lingerer> {
 public:
  /// The engine outlives it.
  Lingerer(Engine* engine, std::shared_ptr<Fd> fd);
  ~Lingerer() override;
  /// A peer that sends more than `max_bytes` meanwhile is not waited for.
  void Start(size_t max_bytes = 64 << 20);
  void OnEventsOnLoop(uint32_t) override;

 private:
  void End();

  Loop& loop_;
  Traffic& traffic_;
  const std::shared_ptr<Fd> fd_;
  Loop::HandlerId id_ = 0;
  Loop::TimerId timer_;
  size_t bytes_left_ = 0;
};

}  // namespace Atoll::transport
