// Our implementation of TensorPipe's transport interface: one per endpoint. It owns the door (the listening
// sockets), greets who comes, and lets TensorPipe see only connections of authenticated peers whose first
// frames are here and well-formed.
//
//   socket -> Greeter (handshake) -> Arrival (first frames) -> Door of a listener -> TensorPipe
//
// To TensorPipe an address is one of
//   "lane/<listener>"          what our listeners say; each process replaces it by the next:
//   "route/<id>/<listener>"    a further connection to where an existing pipe goes
//   "ticket/<id>"              a connection that is open and greeted already (Offer)
// so no peer can make us connect to an address of its choice.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/transport/connection.h"
#include "atoll/transport/engine.h"
#include "atoll/transport/frame_check.h"
#include "atoll/transport/greeter.h"
#include "atoll/transport/link.h"

namespace Atoll::transport {

/// Where one of TensorPipe's listeners waits for connections. Thread-safe.
class Door {
 public:
  using Accept = tensorpipe::transport::Listener::accept_callback_fn;
  void Wait(Accept accept);
  /// Dropped (which closes it) if the door is closed.
  void Deliver(std::shared_ptr<Connection> connection);
  void Close();

 private:
  absl::Mutex mu_;
  std::deque<Accept> waiting_ ABSL_GUARDED_BY(mu_);
  std::deque<std::shared_ptr<Connection>> ready_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

/// Held by shared_ptr by the endpoint and TensorPipe. Thread-safe.
class TransportContext final : public tensorpipe::transport::Context,
                               public std::enable_shared_from_this<TransportContext> {
 public:
  struct Options {
    HandshakeConfig handshake;
    std::shared_ptr<const TlsContext> tls;  ///< Of TCP; null: none.
    absl::Duration handshake_limit;
    int max_unauthenticated = 0;
    MessageLimits limits;
  };
  TransportContext(std::shared_ptr<Engine> engine, Options options);

  /// Begins to accept on `listening`, bound to `address`. Once TensorPipe's listeners are there. Not on the
  /// loop. An error if the system cannot watch the socket.
  absl::Status Serve(Fd listening, const SocketAddress& address);
  /// The channels that a peer's brochure is compared with. Before Serve and Offer.
  void SetChannels(std::shared_ptr<const ChannelTable> channels) { channels_ = std::move(channels); }

  /// Takes an open connection for a new pipe and returns the address under which TensorPipe gets it. On the
  /// loop. `link` is settled when TensorPipe has read the peer's answer, or the connection has ended.
  std::string Offer(Greeted greeted, std::shared_ptr<Link> link);
  /// The link of a pipe that TensorPipe accepted, by the name it gives for the remote side; null if there
  /// is none (any more).
  std::shared_ptr<Link> TakeLink(const std::string& remote_name);

  std::shared_ptr<Greeter> NewGreeter() const {
    return std::make_shared<Greeter>(engine_.get(), &options_.handshake, options_.tls);
  }
  Engine* engine() const { return engine_.get(); }

  // tensorpipe::transport::Context. Neither connect nor listen throws.
  std::shared_ptr<tensorpipe::transport::Connection> connect(std::string address) override;
  std::shared_ptr<tensorpipe::transport::Listener> listen(std::string address) override;
  bool isViable() const override { return true; }
  const std::string& domainDescriptor() const override { return domain_; }
  void setId(std::string id) override {}
  /// Closes the door and every connection. Idempotent, does not wait.
  void close() override;
  /// Waits for the loop to end. Idempotent: the channel mpt calls it too.
  void join() override;

 private:
  class Acceptor;
  /// An authenticated connection whose first frames are being read. Loop only.
  struct Arrival {
    std::shared_ptr<Stream> stream;
    base::MemberId peer;
    Purpose purpose;
    SocketAddress address;
    std::string first_frame;
    std::optional<Loop::TimerId> timer;
  };
  struct Offered {
    Greeted greeted;
    std::shared_ptr<Link> link;
  };

  bool closed() const {
    absl::MutexLock lock(&mu_);
    return closed_;
  }
  absl::Status ServeOnLoop(const std::shared_ptr<Acceptor>& acceptor);
  void AcceptOnLoop(Acceptor* acceptor);
  void ShedOnLoop(int listening_fd);
  void GreetOnLoop(Fd fd, const SocketAddress& address);
  /// False if nobody is at the door.
  bool DropOldestOnLoop(absl::string_view why);
  void AdmitOnLoop(Greeted greeted);
  absl::Status OnFirstFrame(const std::shared_ptr<Arrival>& arrival, absl::string_view frame);
  absl::Status OnBrochure(const std::shared_ptr<Arrival>& arrival, absl::string_view frame);
  void Deliver(const std::shared_ptr<Arrival>& arrival, std::shared_ptr<Link> link);
  void Refuse(const absl::Status& status, const SocketAddress& address);
  /// Whether an operator should hear of a refusal: of each kind once a host, and of few in all, since strangers
  /// can cause them.
  bool IsNewsOnLoop(const absl::Status& status, const SocketAddress& address);
  void CloseOnLoop();

  std::shared_ptr<Stream> NewStream(std::shared_ptr<Link> link);
  std::shared_ptr<tensorpipe::transport::Connection> Wrap(std::shared_ptr<Stream> stream,
                                                          std::shared_ptr<Link> link,
                                                          std::shared_ptr<Route> route);
  std::shared_ptr<tensorpipe::transport::Connection> ConnectTicket(uint64_t id);
  std::shared_ptr<tensorpipe::transport::Connection> ConnectRoute(uint64_t id, int listener);
  std::shared_ptr<tensorpipe::transport::Connection> Refused(absl::Status status);

  const std::shared_ptr<Engine> engine_;
  Loop& loop_;
  const Options options_;
  const std::string domain_ = kTransportDomain;
  std::shared_ptr<const ChannelTable> channels_;
  std::vector<std::shared_ptr<Door>> doors_;  // Constant. 0: TensorPipe's core; then mpt's lanes.

  // Loop only.
  std::vector<std::shared_ptr<Acceptor>> acceptors_;
  std::list<std::shared_ptr<Greeter>> strangers_;
  std::map<Greeter*, std::shared_ptr<Greeter>> callers_;  // Our own further connections, being greeted.
  std::map<std::string, std::set<std::string>> told_;     // Refusals that were logged, by host.
  bool told_full_ = false;                                // That descriptors ran out.
  Fd reserve_;  // Given up for a moment when descriptors run out, to shed who waits at the door.

  mutable absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, Offered> offered_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, std::weak_ptr<Route>> routes_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<Link>> accepted_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<Stream*, std::weak_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::transport
