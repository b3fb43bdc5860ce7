// One socket from its first byte to the end of the handshake, on the loop. Hands the socket on when the
// peer is known, and closes it otherwise.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "atoll/transport/engine.h"
#include "atoll/transport/handshake_core.h"
#include "atoll/transport/socket.h"
#include "atoll/transport/tls.h"

namespace Atoll::transport {

/// A socket whose peer is known.
struct Greeted {
  Fd fd;
  base::MemberId peer;
  Purpose purpose;
  SocketAddress address;
  std::shared_ptr<Tls> tls = nullptr;  ///< Null: plain.
};

/// All on the loop, which outlives it. Held by its registration until it is done.
class Greeter : public Loop::Handler, public std::enable_shared_from_this<Greeter> {
 public:
  /// Called once, on the loop, possibly before Start returns. DeadlineExceeded after the limit, Unavailable
  /// if nobody answers or the peer hangs up, else as Handshake::status.
  using Done = absl::AnyInvocable<void(absl::StatusOr<Greeted>)>;

  /// Engine and configuration outlive it. `tls` (null: none) is for TCP alone.
  Greeter(Engine* engine, const HandshakeConfig* config, std::shared_ptr<const TlsContext> tls)
      : engine_(*engine),
        loop_(*engine->loop),
        config_(*config),
        tls_context_(std::move(tls)),
        traffic_(engine->traffic) {}
  /// Connects and greets.
  void StartClient(const SocketAddress& address, base::MemberId expected, Purpose purpose,
                   absl::Duration limit, Done done);
  /// Awaits a greeting on an accepted socket.
  void StartServer(Fd fd, const SocketAddress& address, absl::Duration limit, Done done);
  /// Ends it with `status`, unless it is done.
  void Abort(absl::Status status) { Finish(std::move(status)); }

  void OnEventsOnLoop(uint32_t events) override;

 private:
  void Start(absl::Duration limit);
  absl::Status Advance(uint32_t events);
  void TakeTls(Tls::Side side);
  /// Goes on with TLS, until secured_; or finds that the peer speaks without, and gives `tls_` up.
  absl::Status Secure();
  absl::Status Send();
  absl::Status Receive();
  void Finish(absl::Status status);

  Engine& engine_;
  Loop& loop_;
  const HandshakeConfig& config_;
  const std::shared_ptr<const TlsContext> tls_context_;
  Traffic& traffic_;
  Fd fd_;
  SocketAddress address_;
  Loop::HandlerId id_ = 0;
  std::optional<Loop::TimerId> timer_;
  std::unique_ptr<Handshake> handshake_;
  std::string output_;
  bool connecting_ = false;
  std::shared_ptr<Tls> tls_;
  Tls::Side side_ = Tls::Side::kClient;
  bool heard_ = false;    // The peer's first byte is one of TLS.
  bool secured_ = false;  // TLS is established: the handshake proper runs.
  Done done_;
};

}  // namespace Atoll::transport
