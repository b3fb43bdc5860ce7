// Certificates and keys from PEM files into OpenSSL's objects, with errors that name the file and say what
// would be right: all of them InvalidArgument. No state, any thread.
#pragma once

#include <openssl/types.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "atoll/base/tls_options.h"

namespace Atoll::transport {

struct TlsFree {
  void operator()(X509* certificate) const;
  void operator()(EVP_PKEY* key) const;
  void operator()(X509_STORE* store) const;
};

/// Who we are, and whom we believe.
struct TlsIdentity {
  std::vector<std::unique_ptr<X509, TlsFree>> chain;  ///< Ours first.
  std::unique_ptr<EVP_PKEY, TlsFree> key;
  std::unique_ptr<X509_STORE, TlsFree> authorities;
};

/// Reads the three files and checks that they fit: the key is the certificate's and nobody else can read it, the
/// certificate comes from the CA, is valid now, and may be used by clients and by servers.
absl::StatusOr<TlsIdentity> ReadTlsIdentity(const base::TlsOptions& options);

}  // namespace Atoll::transport
