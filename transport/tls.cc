#include "atoll/transport/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"

namespace Atoll::transport {
namespace {

constexpr size_t kRecordBytes = 16 << 10;
// Encrypted before a send: enough to be worth a system call, little enough to stay in the cache.
constexpr size_t kSendBytes = 128 << 10;
constexpr size_t kReceiveBytes = 256 << 10;
// Beyond what a send encrypts OpenSSL writes little on its own: a peer that makes it write more is cut off.
constexpr size_t kMaxOutBytes = 2 * kSendBytes;
constexpr size_t kSecretBytes = 32;
constexpr absl::string_view kBindingLabel = "EXPORTER-Atoll-handshake";
unsigned char* Bytes(char* text) { return reinterpret_cast<unsigned char*>(text); }

}  // namespace

/// What OpenSSL takes for the socket: called inside calls of ours, which hold the mutex.
struct Tls::Bio {
  static int Read(BIO* bio, char* into, size_t bytes, size_t* got) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    auto* tls = static_cast<Tls*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    ssize_t received;
    do {
      received = recv(tls->read_fd_, into, bytes, MSG_DONTWAIT);
    } while (received < 0 && errno == EINTR);
    if (received < 0 && errno == EAGAIN) {
      BIO_set_retry_read(bio);
      return 0;
    }
    if (received < 0) {
      tls->read_error_ = errno;
      return 0;
    }
    if (received == 0) {
      tls->ended_ = true;
      return 0;
    }
    tls->traffic_.bytes_received.fetch_add(received, std::memory_order_relaxed);
    *got = received;
    return 1;
  }
  static int Write(BIO* bio, const char* data, size_t bytes, size_t* written) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    auto* tls = static_cast<Tls*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    if (tls->out_.size() + bytes > kMaxOutBytes) return 0;
    tls->out_.append(data, bytes);
    *written = bytes;
    return 1;
  }
  static long Control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }
  static BIO_METHOD* Method() {
    static BIO_METHOD* const method = [] {
      BIO_METHOD* const made = BIO_meth_new(BIO_TYPE_SOURCE_SINK, "atoll socket");
      BIO_meth_set_read_ex(made, Read);
      BIO_meth_set_write_ex(made, Write);
      BIO_meth_set_ctrl(made, Control);
      return made;
    }();
    return method;
  }
};

// --- The handshake ------------------------------------------------------------------------------------

Tls::Tls(std::shared_ptr<const TlsContext> context, Side side, Traffic* traffic)
    : context_(std::move(context)), side_(side), traffic_(*traffic), ssl_(SSL_new(context_->ssl_context_)) {
  ATOLL_CHECK(ssl_ != nullptr) << "OpenSSL has no memory for a connection";
  BIO* const bio = BIO_new(Bio::Method());
  ATOLL_CHECK(bio != nullptr) << "OpenSSL has no memory for a connection";
  BIO_set_data(bio, this);
  BIO_set_init(bio, 1);
  absl::MutexLock lock(&mu_);
  SSL_set_bio(ssl_, bio, bio);
  SSL_set_app_data(ssl_, this);
  if (side == Side::kClient) {
    SSL_set_connect_state(ssl_);
  } else {
    SSL_set_accept_state(ssl_);
  }
  // A client without certificates believes none: only the pre-shared key gets past it.
  if (context_->mode() == base::TlsMode::kCert) {
    SSL_set_verify(ssl_, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  } else {
    SSL_set_verify(ssl_, side == Side::kClient ? SSL_VERIFY_PEER : SSL_VERIFY_NONE, nullptr);
  }
}

Tls::~Tls() {
  absl::MutexLock lock(&mu_);
  SSL_free(ssl_);
}

absl::Status Tls::Handshake(int fd) {
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    if (!failure_.ok()) return failure_;
    read_fd_ = fd;
    ERR_clear_error();
    const int result = SSL_do_handshake(ssl_);
    if (result == 1) {
      established_ = true;
      if (context_->mode() == base::TlsMode::kPsk && SSL_session_reused(ssl_) != 1)
        failure_ = absl::UnauthenticatedError("the peer came in without the job key");
    } else if (SSL_get_error(ssl_, result) != SSL_ERROR_WANT_READ) {
      failure_ = ExplainLocked();
    }
    status = failure_;
  }
  if (!Flush(fd) && errno != EAGAIN && status.ok()) {
    // The peer's reason for hanging up may still be there to be read.
    absl::MutexLock lock(&mu_);
    if (!established_) return absl::UnavailableError("the peer hung up during the TLS handshake");
  }
  return status;
}

std::string Tls::Binding() const {
  absl::MutexLock lock(&mu_);
  std::string binding(kSecretBytes, '\0');
  ATOLL_CHECK(SSL_export_keying_material(ssl_, Bytes(binding.data()), binding.size(), kBindingLabel.data(),
                                         kBindingLabel.size(), nullptr, 0, 0) == 1)
      << "no keying material";
  return binding;
}

absl::Status Tls::failure() const {
  absl::MutexLock lock(&mu_);
  return failure_;
}

absl::Status Tls::ExplainLocked() {
  // The first error is the cause of the others.
  const unsigned long error = ERR_peek_error();
  const int reason = ERR_GET_REASON(error);
  const char* const text = ERR_reason_error_string(error);
  ERR_clear_error();
  const bool certificates = context_->mode() == base::TlsMode::kCert;
  if (refused_offer_) {
    if (offered_.empty())
      return absl::InvalidArgumentError("the peer speaks TLS, but it is no Atoll endpoint");
    return absl::FailedPreconditionError(absl::StrCat("the peer has --tls=", offered_,
                                                      ", we have --tls=", base::TlsModeName(context_->mode()),
                                                      ": all processes of a job should have the same"));
  }
  if (read_error_ != 0) return absl::UnavailableError(base::ErrnoStatus(read_error_, "recv").message());
  if (ended_) return absl::UnavailableError("the peer hung up during the TLS handshake");
  if (ERR_GET_LIB(error) == ERR_LIB_SSL && reason > SSL_AD_REASON_OFFSET)
    return ExplainAlertLocked(reason - SSL_AD_REASON_OFFSET);
  if (const long verdict = SSL_get_verify_result(ssl_); certificates && verdict != X509_V_OK) {
    return absl::UnauthenticatedError(absl::StrCat("the peer's certificate is not valid for our CA ",
                                                   context_->options_.ca_file, ": ",
                                                   X509_verify_cert_error_string(verdict)));
  }
  if (certificates && reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE)
    return absl::UnauthenticatedError("the peer shows no certificate");
  if (!certificates && (reason == SSL_R_BINDER_DOES_NOT_VERIFY || reason == SSL_R_CERTIFICATE_VERIFY_FAILED))
    return absl::UnauthenticatedError("the peer does not have the job key");
  if (established_) return absl::UnavailableError(absl::StrCat("TLS: ", text != nullptr ? text : "failed"));
  return absl::InvalidArgumentError(
      absl::StrCat("what the peer sends is not TLS as an Atoll endpoint speaks it (",
                   text != nullptr ? text : "failed", ")"));
}

absl::Status Tls::ExplainAlertLocked(int alert) {
  const char* const text = SSL_alert_desc_string_long(alert);
  const bool certificates = context_->mode() == base::TlsMode::kCert;
  switch (alert) {
    case SSL_AD_NO_APPLICATION_PROTOCOL:
      return absl::FailedPreconditionError(
          absl::StrCat("it has not --tls=", base::TlsModeName(context_->mode()),
                       " as we have, but another kind of TLS: all processes of a job should have the same"));
    case SSL_AD_BAD_CERTIFICATE:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
    case SSL_AD_CERTIFICATE_REVOKED:
    case SSL_AD_CERTIFICATE_EXPIRED:
    case SSL_AD_CERTIFICATE_UNKNOWN:
    case SSL_AD_UNKNOWN_CA:
    case SSL_AD_CERTIFICATE_REQUIRED:
    case SSL_AD_ACCESS_DENIED:
      if (!certificates) break;
      return absl::UnauthenticatedError(
          absl::StrCat("the peer refuses our certificate ", context_->options_.certificate_file, ": ", text));
    case SSL_AD_DECRYPT_ERROR:
    case SSL_AD_ILLEGAL_PARAMETER:  // What OpenSSL says of a wrong key.
      if (certificates || established_) break;
      return absl::UnauthenticatedError("it does not have our job key (or we have a wrong one)");
    default:
      break;
  }
  return absl::UnavailableError(absl::StrCat("the peer ended TLS: ", text));
}

// --- Bytes --------------------------------------------------------------------------------------------

bool Tls::EncryptRecord(const char* data, size_t bytes) {
  absl::MutexLock lock(&mu_);
  if (!failure_.ok()) return false;
  ERR_clear_error();
  if (++records_ > context_->records_per_key_) {
    records_ = 1;
    SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED);
  }
  size_t written = 0;
  if (SSL_write_ex(ssl_, data, bytes, &written) == 1 && written == bytes) return true;
  failure_ = ExplainLocked();
  return false;
}

size_t Tls::Encrypt(const iovec* parts, size_t count) {
  // Small pieces share a record.
  size_t total = 0, staged = 0;
  for (size_t i = 0; i < count && total < kSendBytes; ++i) {
    const char* data = static_cast<const char*>(parts[i].iov_base);
    size_t left = std::min(parts[i].iov_len, kSendBytes - total);
    total += left;
    while (left > 0) {
      if (staged == 0 && left >= kRecordBytes) {
        if (!EncryptRecord(data, kRecordBytes)) return 0;
        data += kRecordBytes;
        left -= kRecordBytes;
        continue;
      }
      if (stage_ == nullptr) stage_.reset(new char[kRecordBytes]);
      const size_t size = std::min(left, kRecordBytes - staged);
      std::memcpy(stage_.get() + staged, data, size);
      staged += size;
      data += size;
      left -= size;
      if (staged < kRecordBytes) break;
      if (!EncryptRecord(stage_.get(), std::exchange(staged, 0))) return 0;
    }
  }
  if (staged > 0 && !EncryptRecord(stage_.get(), staged)) return 0;
  return total;
}

bool Tls::Flush(int fd) {
  while (true) {
    if (flight_sent_ == flight_.size()) {
      flight_.clear();
      flight_sent_ = 0;
      absl::MutexLock lock(&mu_);
      flight_.swap(out_);
      if (flight_.empty()) return true;
    }
    const ssize_t sent =
        send(fd, flight_.data() + flight_sent_, flight_.size() - flight_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    traffic_.bytes_sent.fetch_add(sent, std::memory_order_relaxed);
    flight_sent_ += sent;
  }
}

ssize_t Tls::Send(int fd, const iovec* parts, size_t count) {
  if (encrypted_ == 0) {
    encrypted_ = Encrypt(parts, count);
    if (encrypted_ == 0) {
      errno = EPROTO;
      return -1;
    }
  }
  if (!Flush(fd)) return -1;
  return static_cast<ssize_t>(std::exchange(encrypted_, 0));
}

Tls::Outcome Tls::ReceiveLocked(int fd, char* into, size_t bytes, bool peek, size_t* got) {
  if (!failure_.ok()) return Outcome::kFailed;
  read_fd_ = fd;
  ERR_clear_error();
  const int done = peek ? SSL_peek_ex(ssl_, into, bytes, got) : SSL_read_ex(ssl_, into, bytes, got);
  if (done == 1) return Outcome::kBytes;
  const int error = SSL_get_error(ssl_, done);
  if (error == SSL_ERROR_WANT_READ) return Outcome::kAgain;
  // The frames' lengths, and the numbers of what they carry, tell an early end from a right one.
  if (error == SSL_ERROR_ZERO_RETURN || (ended_ && read_error_ == 0)) {
    ERR_clear_error();
    return Outcome::kEnd;
  }
  failure_ = ExplainLocked();
  return Outcome::kFailed;
}

ssize_t Tls::Receive(int fd, const iovec* parts, size_t count) {
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    size_t filled = 0;
    while (filled < parts[i].iov_len && total < kReceiveBytes) {
      size_t got = 0;
      Outcome outcome;
      {
        absl::MutexLock lock(&mu_);
        outcome = ReceiveLocked(fd, static_cast<char*>(parts[i].iov_base) + filled, parts[i].iov_len - filled,
                                /*peek=*/false, &got);
      }
      // Whatever ended it says so again the next time.
      if (outcome != Outcome::kBytes && total > 0) return static_cast<ssize_t>(total);
      if (outcome == Outcome::kEnd) return 0;
      if (outcome != Outcome::kBytes) {
        errno = outcome == Outcome::kAgain ? EAGAIN : EPROTO;
        return -1;
      }
      filled += got;
      total += got;
    }
  }
  return static_cast<ssize_t>(total);
}

bool Tls::AtEnd(int fd) {
  absl::MutexLock lock(&mu_);
  char byte;
  size_t got = 0;
  const Outcome outcome = ReceiveLocked(fd, &byte, 1, /*peek=*/true, &got);
  return outcome == Outcome::kEnd || outcome == Outcome::kFailed;
}

void Tls::SayGoodbye(int fd) {
  {
    absl::MutexLock lock(&mu_);
    if (!failure_.ok()) return;
    ERR_clear_error();
    SSL_shutdown(ssl_);
    ERR_clear_error();
  }
  Flush(fd);
}

}  // namespace Atoll::transport
