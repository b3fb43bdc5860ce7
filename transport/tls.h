// TLS 1.3 on one socket: what sendmsg and recvmsg are to a plain one. The socket itself stays with its owner, who
// waits for it and passes its descriptor; OpenSSL never touches it but through here, so it neither blocks nor
// raises a signal.
//
//   Greeter or Stream  <-- Send, Receive -->  Tls (an SSL, one buffer a direction)  <-- send, recv -->  socket
#pragma once

#include <openssl/types.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/tls_options.h"
#include "atoll/transport/engine.h"

struct ssl_session_st;  // Not among OpenSSL's own forward declarations.

namespace Atoll::transport {

class Tls;

/// What all TLS connections of an endpoint have in common. Constant once made; any thread.
class TlsContext {
 public:
  /// kPsk takes its secret from `job_key`; kCert reads its files, and each that is wrong is InvalidArgument,
  /// named. Not for kNone.
  static absl::StatusOr<std::shared_ptr<TlsContext>> Create(const base::TlsOptions& options,
                                                            absl::string_view job_key);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  base::TlsMode mode() const { return options_.mode; }
  /// Records sent under one key before it is replaced.
  void set_records_per_key_for_test(uint64_t count) { records_per_key_ = count; }

 private:
  friend class Tls;
  struct Callbacks;
  explicit TlsContext(const base::TlsOptions& options) : options_(options) {}
  absl::Status SetUp(absl::string_view job_key);
  absl::Status UsePsk(absl::string_view job_key);
  absl::Status UseCertificates();

  const base::TlsOptions options_;
  SSL_CTX* ssl_context_ = nullptr;
  ssl_session_st* psk_ = nullptr;
  // RFC 8446, 5.5: about 2^24.5 full records of AES-GCM a key.
  uint64_t records_per_key_ = uint64_t{1} << 23;
};

/// Held by who owns the socket. One thread at a time hands over bytes to send, one takes those received, and both
/// may do so at the same time; a mutex keeps them apart inside OpenSSL for one record (16 KiB) each.
class Tls {
 public:
  enum class Side { kClient, kServer };
  /// Bytes that travel are counted in `traffic`, which outlives it.
  Tls(std::shared_ptr<const TlsContext> context, Side side, Traffic* traffic);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  /// Goes on with the handshake as far as the socket lets it; what it still has to say (an alert, too) is sent
  /// as far as that. OK without established(): call again when the socket is ready. Otherwise
  ///   Unauthenticated: a wrong job key, or a certificate that either side refuses, and why;
  ///   FailedPrecondition: another mode of TLS; InvalidArgument: not TLS, or not ours;
  ///   Unavailable: the peer hung up.
  /// In mode cert a client's certificate is refused only after the client's handshake: Receive fails then.
  absl::Status Handshake(int fd);
  bool established() const { return established_; }
  /// Once established: 32 bytes that only the two ends of this TLS connection know (RFC 5705).
  std::string Binding() const;

  /// As sendmsg: how many bytes of `parts` are on their way, from the first on; -1 with errno EAGAIN: the socket is
  /// full; another errno: see failure(). Until bytes are reported the next call begins with the same bytes.
  ssize_t Send(int fd, const iovec* parts, size_t count);
  /// As recvmsg: 0 if the peer has closed, -1 with errno EAGAIN if the socket is empty, and nothing is kept here.
  ssize_t Receive(int fd, const iovec* parts, size_t count);
  /// No more will come, and all that came was received. Where Receive may be called.
  bool AtEnd(int fd);
  /// Tells the peer that nothing follows, if the socket takes it. Where Send may be called.
  void SayGoodbye(int fd);
  /// The first error other than the peer's end; OK until then.
  absl::Status failure() const;

 private:
  friend struct TlsContext::Callbacks;
  struct Bio;

  /// Encrypts from the front of `parts`; how many bytes. 0: failed.
  size_t Encrypt(const iovec* parts, size_t count);
  bool EncryptRecord(const char* data, size_t bytes);
  /// Sends what OpenSSL has written: false with errno as Send.
  bool Flush(int fd);
  enum class Outcome { kBytes, kEnd, kAgain, kFailed };
  Outcome ReceiveLocked(int fd, char* into, size_t bytes, bool peek, size_t* got)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  /// What the error is that OpenSSL has just queued.
  absl::Status ExplainLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ExplainAlertLocked(int alert) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::shared_ptr<const TlsContext> context_;
  const Side side_;
  Traffic& traffic_;

  mutable absl::Mutex mu_;
  SSL* const ssl_ ABSL_PT_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  int read_fd_ ABSL_GUARDED_BY(mu_) = -1;
  int read_error_ ABSL_GUARDED_BY(mu_) = 0;   // The errno of a recv that failed.
  bool ended_ ABSL_GUARDED_BY(mu_) = false;   // The peer said so, or hung up.
  std::string out_ ABSL_GUARDED_BY(mu_);      // Written by OpenSSL, for the sender to fetch.
  std::string offered_ ABSL_GUARDED_BY(mu_);  // The mode in the client's hello, if it is not ours.
  bool refused_offer_ ABSL_GUARDED_BY(mu_) = false;

  bool established_ = false;  // Set in Handshake, before anybody sends.

  // The sender's own.
  std::string flight_;  // Being sent.
  size_t flight_sent_ = 0;
  size_t encrypted_ = 0;  // Bytes of the caller that `flight_` and `out_` hold.
  uint64_t records_ = 0;  // Under this key.
  std::unique_ptr<char[]> stage_;
};

}  // namespace Atoll::transport
