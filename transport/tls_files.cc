#include "atoll/transport/tls_files.h"

#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/private_file.h"
#include "atoll/base/status.h"

namespace Atoll::transport {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;

absl::Status Wrong(const std::string& path, absl::string_view what, absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat(what, " ", path, ": ", text));
}

/// `what` ("the certificate") is for the text. `secret`: nobody else may read it.
absl::StatusOr<std::string> ReadPem(const std::string& path, absl::string_view what, bool secret) {
  // Not blocking: a FIFO in its place must not hold us.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return Wrong(path, what, base::ErrnoStatus(errno, "cannot be opened").message());
  absl::Cleanup closer = [fd] { close(fd); };
  struct stat info {};
  if (fstat(fd, &info) != 0) return Wrong(path, what, base::ErrnoStatus(errno, "stat").message());
  if (!S_ISREG(info.st_mode)) return Wrong(path, what, "it is not a regular file: it should be one in PEM");
  if (secret) {
    const absl::Status is_private = base::CheckPrivate(info, path);
    if (!is_private.ok()) return Wrong(path, what, is_private.message());
  }
  std::string bytes(kMaxFileBytes + 1, '\0');
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = read(fd, &bytes[have], bytes.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Wrong(path, what, base::ErrnoStatus(errno, "read").message());
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  if (have > kMaxFileBytes) return Wrong(path, what, "it has more than 1 MiB: it should be a file in PEM");
  bytes.resize(have);
  return bytes;
}

/// The reason of the newest error, or `otherwise`. Empties the queue, which is the thread's.
std::string TakeReason(const char* otherwise) {
  const char* reason = ERR_reason_error_string(ERR_peek_last_error());
  std::string text = reason != nullptr ? reason : otherwise;
  ERR_clear_error();
  return text;
}

absl::StatusOr<std::vector<std::unique_ptr<X509, TlsFree>>> ReadCertificates(const std::string& path,
                                                                             absl::string_view what) {
  ATOLL_ASSIGN_OR_RETURN(const std::string pem, ReadPem(path, what, /*secret=*/false));
  BIO* const bio = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  absl::Cleanup free_bio = [bio] { BIO_free(bio); };
  std::vector<std::unique_ptr<X509, TlsFree>> found;
  ERR_clear_error();
  while (X509* const one = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr)) found.emplace_back(one);
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  const std::string reason = TakeReason("unreadable");
  if (!at_end) {
    return Wrong(path, what,
                 absl::StrCat("certificate ", found.size() + 1, " in it is malformed (", reason,
                              "): it should be in PEM"));
  }
  if (found.empty()) {
    return Wrong(path, what,
                 "there is no certificate in it: it should be in PEM (-----BEGIN CERTIFICATE-----)");
  }
  return found;
}

absl::StatusOr<std::unique_ptr<EVP_PKEY, TlsFree>> ReadKey(const std::string& path) {
  constexpr absl::string_view kWhat = "the private key";
  ATOLL_ASSIGN_OR_RETURN(std::string pem, ReadPem(path, kWhat, /*secret=*/true));
  absl::Cleanup wipe = [&pem] { OPENSSL_cleanse(pem.data(), pem.size()); };
  BIO* const bio = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  absl::Cleanup free_bio = [bio] { BIO_free(bio); };
  // A passphrase is never asked for on a terminal.
  bool asked = false;
  auto no_passphrase = [](char*, int, int, void* noted) {
    *static_cast<bool*>(noted) = true;
    return -1;
  };
  ERR_clear_error();
  std::unique_ptr<EVP_PKEY, TlsFree> key(PEM_read_bio_PrivateKey(bio, nullptr, no_passphrase, &asked));
  const std::string reason = TakeReason("unreadable");
  if (key != nullptr) return key;
  if (asked)
    return Wrong(path, kWhat, "it has a passphrase: it should have none (openssl pkey -in it -out new)");
  return Wrong(path, kWhat,
               absl::StrCat("there is no private key in it that can be read (", reason,
                            "): it should be in PEM (-----BEGIN PRIVATE KEY-----)"));
}

/// That a peer with the same CA will believe us, as `purpose` says.
absl::Status CheckOurs(const TlsIdentity& identity, const base::TlsOptions& options, int purpose) {
  STACK_OF(X509)* const others = sk_X509_new_null();
  absl::Cleanup free_others = [others] { sk_X509_free(others); };
  for (size_t i = 1; i < identity.chain.size(); ++i) sk_X509_push(others, identity.chain[i].get());
  X509_STORE_CTX* const check = X509_STORE_CTX_new();
  absl::Cleanup free_check = [check] { X509_STORE_CTX_free(check); };
  X509_STORE_CTX_init(check, identity.authorities.get(), identity.chain[0].get(), others);
  X509_STORE_CTX_set_purpose(check, purpose);
  const bool valid = X509_verify_cert(check) == 1;
  const int error = X509_STORE_CTX_get_error(check);
  const int depth = X509_STORE_CTX_get_error_depth(check);
  ERR_clear_error();
  if (valid) return absl::OkStatus();
  constexpr absl::string_view kWhat = "the certificate";
  const std::string reason = X509_verify_cert_error_string(error);
  switch (error) {
    case X509_V_ERR_CERT_HAS_EXPIRED:
    case X509_V_ERR_CERT_NOT_YET_VALID:
      // Depth 0 is ours; those above it came from our file or from the CA's.
      if (depth >= static_cast<int>(identity.chain.size())) {
        return Wrong(options.ca_file, "the CA", absl::StrCat(reason, ": it should be valid now"));
      }
      return Wrong(options.certificate_file, kWhat,
                   absl::StrCat(reason, ": it should be one that is valid now"));
    case X509_V_ERR_INVALID_PURPOSE:
      return Wrong(
          options.certificate_file, kWhat,
          absl::StrCat("it is not for TLS ", purpose == X509_PURPOSE_SSL_CLIENT ? "clients" : "servers",
                       ": every process is both, so its extended key usage should have clientAuth and "
                       "serverAuth, or be left out"));
    default:
      return Wrong(options.certificate_file, kWhat,
                   absl::StrCat("it does not lead to the CA ", options.ca_file, " (", reason,
                                "): it should be signed by it, with those in between in the same file"));
  }
}

}  // namespace

void TlsFree::operator()(X509* certificate) const { X509_free(certificate); }
void TlsFree::operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
void TlsFree::operator()(X509_STORE* store) const { X509_STORE_free(store); }

absl::StatusOr<TlsIdentity> ReadTlsIdentity(const base::TlsOptions& options) {
  TlsIdentity identity;
  ATOLL_ASSIGN_OR_RETURN(identity.chain, ReadCertificates(options.certificate_file, "the certificate"));
  ATOLL_ASSIGN_OR_RETURN(identity.key, ReadKey(options.key_file));
  ATOLL_ASSIGN_OR_RETURN(const auto authorities, ReadCertificates(options.ca_file, "the CA"));
  if (X509_check_private_key(identity.chain[0].get(), identity.key.get()) != 1) {
    ERR_clear_error();
    return Wrong(options.key_file, "the private key",
                 absl::StrCat("it is not that of the certificate ", options.certificate_file,
                              " (the first in that file): they should belong together"));
  }
  identity.authorities.reset(X509_STORE_new());
  for (const auto& authority : authorities) X509_STORE_add_cert(identity.authorities.get(), authority.get());
  ERR_clear_error();
  ATOLL_RETURN_IF_ERROR(CheckOurs(identity, options, X509_PURPOSE_SSL_CLIENT));
  ATOLL_RETURN_IF_ERROR(CheckOurs(identity, options, X509_PURPOSE_SSL_SERVER));
  return identity;
}

}  // namespace Atoll::transport
