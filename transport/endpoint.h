// A rank's door to its job: one port for everything, and the connections to others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "atoll/base/clock.h"
#include "atoll/base/ids.h"
#include "atoll/base/tls_options.h"
#include "atoll/transport/pipe.h"

namespace Atoll::transport {

/// How many addresses an endpoint tells, and who lists a member's addresses takes at least.
inline constexpr size_t kMaxAddresses = 16;

/// The secret of a job: 16 to 4,096 bytes. Never logged, never printed.
struct JobKey {
  std::string bytes;
};

struct EndpointOptions {
  std::string job;      ///< The job's id; endpoints of different jobs refuse each other.
  base::MemberId self;  ///< Who we are, proved to every peer.
  JobKey key;

  /// Address to bind: an IPv4 or IPv6 literal ("0.0.0.0", "::1"), a host name, or an interface's name
  /// ("eth0").
  std::string bind = "127.0.0.1";
  /// First port tried and how many; 0 lets the system choose.
  int port = 0;
  int port_count = 1;
  int last_port = 0;  ///< One of these that another may want (the coordinator): taken if no other is free.
  bool enable_unix = true;  ///< Abstract Unix sockets beside TCP, used between processes of one host.
  bool enable_cma = true;   ///< Copies between processes of one host with process_vm_readv.
  /// Tensors over several connections of a pipe, where they are not copied otherwise; without it over one.
  bool enable_mpt = true;
  bool enable_cuda = true;  ///< Buffers on GPUs, where there is a driver: brings LibTorch's CUDA half in.
  /// Path of libatoll_cuda.so, of which a process has one: the first endpoint's. Empty: beside the
  /// executable, in ../lib from there, or where the system looks.
  std::string cuda_library;

  const base::Clock* clock = nullptr;  ///< Of all limits; for tests. Null: the real one.
  /// TLS 1.3 of TCP connections, keyed by `key` or by certificates. Unix sockets stay plain: the kernel keeps
  /// others out. With it no tensor goes past TCP between hosts (no cuda_gdr).
  base::TlsOptions tls;

  absl::Duration handshake_limit = absl::Seconds(10);  ///< A stranger is cut off after this.
  int max_unauthenticated = 256;                       ///< Beyond it the oldest stranger is dropped.
  size_t max_header_bytes = MessageLimits().max_header_bytes;
  size_t max_tensors = MessageLimits().max_tensors;
  size_t max_tensor_bytes = MessageLimits().max_tensor_bytes;
};

/// Thread-safe. The destructor is Close() and Join().
///
/// It belongs to the process that made it (base/fork.h): in a child of fork Connect fails with
/// FailedPrecondition, inline, nothing else does anything, and neither does the destructor. The child holds the
/// descriptors of the connections until it ends or execs: until then peers do not see them close.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  /// Where peers can reach us, best first, each as Connect takes it: "unix:@name" (same host and
  /// network namespace only) and "host:port" or "[v6]:port". Of a wildcard's addresses those of loopback are
  /// left out, unless there are no others. 1 to kMaxAddresses.
  virtual std::vector<std::string> addresses() const = 0;
  /// The TCP port that is bound.
  virtual int port() const = 0;
  /// Of the options, as they hold for its pipes.
  virtual MessageLimits limits() const { return {}; }

  /// From now on each authenticated peer's new pipe is given to `on_pipe` (on a loop thread). Before
  /// it, new pipes wait. Called once.
  virtual void OnPipe(absl::AnyInvocable<void(std::shared_ptr<Pipe>)> on_pipe) = 0;

  /// `on_broken` is told, once and on the loop thread, when the endpoint can carry nothing any more: a
  /// callback threw, or TensorPipe did, never for what a peer sends. By then all connections are cut; every
  /// outstanding callback gets Internal, as does all that follows. Buffers that were lent should stay, since
  /// a copy may still be under way: what is left is to end the process. Another one replaces it.
  virtual void OnBroken(absl::AnyInvocable<void(absl::Status)> on_broken) {}

  /// Opens a pipe to the first of `addresses` that answers the handshake (one of a kind that we do not have
  /// is passed over). Whether the peer is there is for those to say that mean the same everywhere: not for
  /// Unix names beside TCP addresses, nor for loopback beside others, nor for any beside a host name that is not known
  /// now. `expected.name` must be the peer's name unless empty, `expected.incarnation` its incarnation unless 0. `done`
  /// runs once, on a loop thread, with the pipe or
  ///   Unavailable: nobody answers (ran: no); the message has each address and what it said; IsRefused
  ///   (refusal.h) if all of those that decide said that nobody listens;
  ///   NotFound: an endpoint answers, but it is another name or incarnation;
  ///   Unauthenticated: it does not know the job key, or we do not; or one side refuses the other's certificate;
  ///   FailedPrecondition: another version, job, TLS mode, or set of transports; the text says which;
  ///   DeadlineExceeded: `limit` passed;
  ///   Cancelled, Internal: the endpoint is closed, or broken (OnBroken).
  virtual void Connect(std::vector<std::string> addresses, base::MemberId expected, Lane lane,
                       absl::Duration limit,
                       absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Pipe>>)> done) = 0;

  /// Runs `task` on a loop thread, behind what that does now; inside this call once the loop has ended. It must not
  /// wait.
  virtual void Defer(absl::AnyInvocable<void()> task) = 0;

  /// Counts since the start, for metrics and tests.
  struct Counters {
    uint64_t accepted = 0;       ///< Sockets accepted.
    uint64_t authenticated = 0;  ///< Of those, that completed the handshake.
    uint64_t refused = 0;        ///< Wrong bytes, key, version or job, or too slow.
    uint64_t bytes_sent = 0;     ///< On all sockets, handshake and framing included.
    uint64_t bytes_received = 0;
  };
  virtual Counters counters() const = 0;

  /// Closes the door and every pipe; does not wait. Idempotent.
  virtual void Close() = 0;
  /// Waits until all threads ended and all callbacks ran. Not on a loop thread.
  virtual void Join() = 0;
};

/// Binds and starts. Of a host name's addresses the first is taken that is this machine's; a link-local IPv6 address
/// needs its scope ("fe80::1%eth0"). No port to be had is FailedPrecondition and names the ports tried; an address that is not ours, or an interface that is not there, is InvalidArgument and lists what
/// there is; a file of `tls` that is missing, unreadable, malformed, expired, open to others, or does not fit
/// the other files is InvalidArgument and named.
absl::StatusOr<std::shared_ptr<Endpoint>> CreateEndpoint(EndpointOptions options);

}  // namespace Atoll::transport
