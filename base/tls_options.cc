#include "atoll/base/tls_options.h"

#include "absl/strings/str_cat.h"

namespace Atoll::base {

absl::string_view TlsModeName(TlsMode mode) {
  switch (mode) {
    case TlsMode::kNone:
      return "none";
    case TlsMode::kPsk:
      return "psk";
    case TlsMode::kCert:
      return "cert";
  }
  return "?";
}

std::optional<TlsMode> ParseTlsMode(absl::string_view name) {
  for (TlsMode mode : {TlsMode::kNone, TlsMode::kPsk, TlsMode::kCert}) {
    if (name == TlsModeName(mode)) return mode;
  }
  return std::nullopt;
}

absl::Status CheckTlsOptions(const TlsOptions& options) {
  const struct {
    const std::string& path;
    absl::string_view variable, flag, what;
  } files[] = {
      {options.certificate_file, "ATOLL_TLS_CERT", "--tls_cert", "the file of this process's certificate"},
      {options.key_file, "ATOLL_TLS_KEY", "--tls_key", "the file of its private key"},
      {options.ca_file, "ATOLL_TLS_CA", "--tls_ca", "the file of the job's CA"},
  };
  for (const auto& file : files) {
    if (options.mode == TlsMode::kCert && file.path.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.flag, " (", file.variable, ") is not given: with --tls=cert it should be ", file.what));
    }
    if (options.mode != TlsMode::kCert && !file.path.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.flag, " (", file.variable, ") is given, but the TLS mode is ",
                       TlsModeName(options.mode), ": files are for --tls=cert alone"));
    }
  }
  return absl::OkStatus();
}

}  // namespace Atoll::base
