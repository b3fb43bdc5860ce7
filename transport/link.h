// What transport knows of one pipe beside TensorPipe's own state: its peer, and between which devices it
// can carry tensors. Shared by the pipe, its first connection, and who waits for it to be established.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "atoll/transport/channel_table.h"
#include "atoll/transport/pipe.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport {

/// Thread-safe.
class Link {
 public:
  explicit Link(PeerInfo peer) : peer_(std::move(peer)) {}
  const PeerInfo& peer() const { return peer_; }

  /// Runs `done` once: OK when both ends have agreed on channels, or the reason why they never will. In
  /// the thread that settles it, or now.
  void OnSettled(absl::AnyInvocable<void(absl::Status)> done) {
    absl::Status status;
    {
      absl::MutexLock lock(&mu_);
      if (!settled_.has_value()) {
        on_settled_ = std::move(done);
        return;
      }
      status = *settled_;
    }
    std::move(done)(std::move(status));
  }
  /// The first call counts.
  void Settle(absl::StatusOr<DevicePairs> pairs) {
    absl::AnyInvocable<void(absl::Status)> done;
    {
      absl::MutexLock lock(&mu_);
      if (settled_.has_value()) return;
      settled_ = pairs.status();
      if (pairs.ok()) pairs_ = *std::move(pairs);
      done = std::move(on_settled_);
      on_settled_ = nullptr;
      if (!done) return;
    }
    std::move(done)(pairs.status());
  }
  /// Runs `on_ended` once, when the pipe's first connection has ended, whoever ended it.
  void OnEnded(absl::AnyInvocable<void(absl::Status)> on_ended) {
    absl::Status status;
    {
      absl::MutexLock lock(&mu_);
      if (!ended_.has_value()) {
        on_ended_ = std::move(on_ended);
        return;
      }
      status = *ended_;
    }
    std::move(on_ended)(std::move(status));
  }
  void End(const absl::Status& status) {
    Settle(status);
    absl::AnyInvocable<void(absl::Status)> on_ended;
    {
      absl::MutexLock lock(&mu_);
      if (ended_.has_value()) return;
      ended_ = status;
      on_ended = std::move(on_ended_);
      on_ended_ = nullptr;
      if (!on_ended) return;
    }
    std::move(on_ended)(status);
  }
  /// Runs `on_hung_up` once, on the loop, when the peer has hung up the first connection behind bytes that nobody
  /// reads: what they are may never be known, if the pipe cannot be completed any more. Not kept if it has happened.
  void OnHungUp(absl::AnyInvocable<void()> on_hung_up) {
    {
      absl::MutexLock lock(&mu_);
      if (!hung_up_) {
        on_hung_up_ = std::move(on_hung_up);
        return;
      }
    }
    std::move(on_hung_up)();
  }
  void HangUp() {
    absl::AnyInvocable<void()> on_hung_up;
    {
      absl::MutexLock lock(&mu_);
      hung_up_ = true;
      on_hung_up = std::exchange(on_hung_up_, nullptr);
    }
    if (on_hung_up) std::move(on_hung_up)();
  }
  bool hung_up() const {
    absl::MutexLock lock(&mu_);
    return hung_up_;
  }
  /// Empty until settled, constant from then on.
  DevicePairs pairs() const {
    absl::MutexLock lock(&mu_);
    return pairs_;
  }

 private:
  const PeerInfo peer_;
  mutable absl::Mutex mu_;
  std::optional<absl::Status> settled_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> ended_ ABSL_GUARDED_BY(mu_);
  absl::AnyInvocable<void(absl::Status)> on_ended_ ABSL_GUARDED_BY(mu_);
  bool hung_up_ ABSL_GUARDED_BY(mu_) = false;
  absl::AnyInvocable<void()> on_hung_up_ ABSL_GUARDED_BY(mu_);
  DevicePairs pairs_ ABSL_GUARDED_BY(mu_);
  absl::AnyInvocable<void(absl::Status)> on_settled_ ABSL_GUARDED_BY(mu_);
};

/// Where the further connections of a pipe that we opened go: to the same process by the same way. Its id
/// stands in the addresses that TensorPipe is given ("route/<id>/<listener>"), in place of what the peer
/// wrote there. Held by the connections of the pipe.
struct Route {
  uint64_t id = 0;
  SocketAddress address;
  base::MemberId peer;
};

}  // namespace Atoll::transport
