// How TCP connections of a job are protected beyond the job key's proof: docs/security.md. Beside what knows
// TLS, because the launch reads it and the transport uses it.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace Atoll::base {

enum class TlsMode {
  kNone,  ///< The peer is proved, the bytes are bare.
  kPsk,   ///< TLS 1.3 with a key derived from the job key.
  kCert,  ///< TLS 1.3 with a certificate on both sides.
};
absl::string_view TlsModeName(TlsMode mode);  // "none", "psk", "cert": what users write
std::optional<TlsMode> ParseTlsMode(absl::string_view name);

/// All processes of a job have the same mode.
struct TlsOptions {
  TlsMode mode = TlsMode::kNone;
  // Of kCert, in PEM.
  std::string certificate_file;  ///< Our certificate, then those between it and the CA.
  std::string key_file;          ///< Its private key, without a passphrase, readable by us alone.
  std::string ca_file;           ///< The job's CA or CAs: a peer's certificate must come from one of them.
};

/// InvalidArgument, naming variable and flag: kCert lacks a file, or a file is given to another mode.
absl::Status CheckTlsOptions(const TlsOptions& options);

}  // namespace Atoll::base
