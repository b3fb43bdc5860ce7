// What the TLS connections of an endpoint have in common, as OpenSSL wants it.
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/ssl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/transport/tls.h"
#include "atoll/transport/tls_files.h"

namespace Atoll::transport {
namespace {

constexpr size_t kReadAheadBytes = 64 << 10;
constexpr size_t kSecretBytes = 32;
// The suite of AES that is fastest; a PSK is tied to its hash.
constexpr char kSuite[] = "TLS_AES_128_GCM_SHA256";
constexpr unsigned char kSuiteId[] = {0x13, 0x01};
constexpr absl::string_view kPskIdentity = "atoll job key";
constexpr absl::string_view kPskLabel = "Atoll TLS 1.3 external PSK";
// The mode is the application protocol, so that the wrong one is refused by name.
constexpr absl::string_view kProtocolPrefix = "atoll-";

unsigned char* Bytes(char* text) { return reinterpret_cast<unsigned char*>(text); }
const unsigned char* Bytes(const char* text) { return reinterpret_cast<const unsigned char*>(text); }

std::string ProtocolOf(base::TlsMode mode) { return absl::StrCat(kProtocolPrefix, base::TlsModeName(mode)); }

/// HKDF-SHA256 of the job key for this purpose alone: what is known of one use of the key says nothing of others.
std::string DerivePsk(absl::string_view job_key) {
  EVP_KDF* const kdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  EVP_KDF_CTX* const context = EVP_KDF_CTX_new(kdf);
  char hash[] = "SHA256";
  OSSL_PARAM params[] = {
      OSSL_PARAM_construct_utf8_string("digest", hash, 0),
      OSSL_PARAM_construct_octet_string("key", const_cast<char*>(job_key.data()), job_key.size()),
      OSSL_PARAM_construct_octet_string("info", const_cast<char*>(kPskLabel.data()), kPskLabel.size()),
      OSSL_PARAM_construct_end()};
  std::string secret(kSecretBytes, '\0');
  const int made = EVP_KDF_derive(context, Bytes(secret.data()), secret.size(), params);
  EVP_KDF_CTX_free(context);
  EVP_KDF_free(kdf);
  ATOLL_CHECK(made == 1) << "HKDF-SHA256 failed";
  return secret;
}

absl::Status OpenSslError(absl::string_view what) {
  const char* reason = ERR_reason_error_string(ERR_peek_last_error());
  absl::Status status =
      absl::InternalError(absl::StrCat("OpenSSL: ", what, ": ", reason != nullptr ? reason : "?"));
  ERR_clear_error();
  return status;
}

}  // namespace

// --- What OpenSSL calls, always inside a call of ours that holds the Tls's mutex -----------------------

struct TlsContext::Callbacks {
  static int OnClientHello(SSL* ssl, int* alert, void* context) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    auto* tls = static_cast<Tls*>(SSL_get_app_data(ssl));
    const std::string ours = ProtocolOf(static_cast<TlsContext*>(context)->mode());
    // A list of protocols: length u16, then each with its length u8. We offer one.
    const unsigned char* data = nullptr;
    size_t size = 0;
    std::string offered;
    if (SSL_client_hello_get0_ext(ssl, TLSEXT_TYPE_application_layer_protocol_negotiation, &data, &size) ==
            1 &&
        size > 3 && size_t{data[2]} + 3 == size) {
      offered.assign(reinterpret_cast<const char*>(data) + 3, size - 3);
    }
    if (offered == ours) return SSL_CLIENT_HELLO_SUCCESS;
    absl::string_view mode = offered;
    if (absl::ConsumePrefix(&mode, kProtocolPrefix) && base::ParseTlsMode(mode).has_value())
      tls->offered_ = std::string(mode);
    tls->refused_offer_ = true;
    *alert = SSL_AD_NO_APPLICATION_PROTOCOL;
    return SSL_CLIENT_HELLO_ERROR;
  }

  static int SelectProtocol(SSL*, const unsigned char** out, unsigned char* out_size, const unsigned char* in,
                            unsigned int in_size, void*) {
    if (in_size < 1 || in_size != 1u + in[0]) return SSL_TLSEXT_ERR_ALERT_FATAL;
    *out = in + 1;
    *out_size = in[0];
    return SSL_TLSEXT_ERR_OK;
  }

  static SSL_SESSION* Psk(SSL* ssl) {
    auto* context = static_cast<TlsContext*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(ssl)));
    SSL_SESSION_up_ref(context->psk_);
    return context->psk_;
  }
  static int OfferPsk(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* id_size,
                      SSL_SESSION** session) {
    *id = Bytes(kPskIdentity.data());
    *id_size = kPskIdentity.size();
    *session = Psk(ssl);
    return 1;
  }
  static int FindPsk(SSL* ssl, const unsigned char* id, size_t id_size, SSL_SESSION** session) {
    const absl::string_view wanted(reinterpret_cast<const char*>(id), id_size);
    *session = wanted == kPskIdentity ? Psk(ssl) : nullptr;
    return 1;
  }
};

absl::StatusOr<std::shared_ptr<TlsContext>> TlsContext::Create(const base::TlsOptions& options,
                                                               absl::string_view job_key) {
  std::shared_ptr<TlsContext> context(new TlsContext(options));
  ERR_clear_error();
  ATOLL_RETURN_IF_ERROR(context->SetUp(job_key));
  return context;
}

TlsContext::~TlsContext() {
  SSL_SESSION_free(psk_);
  SSL_CTX_free(ssl_context_);
}

absl::Status TlsContext::SetUp(absl::string_view job_key) {
  ssl_context_ = SSL_CTX_new(TLS_method());
  if (ssl_context_ == nullptr) return OpenSslError("a context");
  SSL_CTX* const ctx = ssl_context_;
  SSL_CTX_set_app_data(ctx, this);
  if (SSL_CTX_set_min_proto_version(ctx, TLS1_3_VERSION) != 1 ||
      SSL_CTX_set_max_proto_version(ctx, TLS1_3_VERSION) != 1 || SSL_CTX_set_ciphersuites(ctx, kSuite) != 1 ||
      SSL_CTX_set1_groups_list(ctx, "X25519:P-256") != 1) {
    return OpenSslError("TLS 1.3 with its suite and groups");
  }
  // No resumption, hence no tickets and no early data.
  SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(ctx, 0);
  SSL_CTX_set_max_early_data(ctx, 0);
  SSL_CTX_set_options(ctx, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_mode(
      ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_NO_AUTO_CHAIN);
  SSL_CTX_set_read_ahead(ctx, 1);
  SSL_CTX_set_default_read_buffer_len(ctx, kReadAheadBytes);
  const std::string protocol = ProtocolOf(mode());
  const std::string list = absl::StrCat(std::string(1, static_cast<char>(protocol.size())), protocol);
  if (SSL_CTX_set_alpn_protos(ctx, Bytes(list.data()), static_cast<unsigned>(list.size())) != 0)
    return OpenSslError("the protocol's name");
  SSL_CTX_set_alpn_select_cb(ctx, Callbacks::SelectProtocol, nullptr);
  SSL_CTX_set_client_hello_cb(ctx, Callbacks::OnClientHello, this);
  return mode() == base::TlsMode::kPsk ? UsePsk(job_key) : UseCertificates();
}

absl::Status TlsContext::UsePsk(absl::string_view job_key) {
  std::string secret = DerivePsk(job_key);
  psk_ = SSL_SESSION_new();
  SSL* const lookup = SSL_new(ssl_context_);
  const SSL_CIPHER* const cipher = SSL_CIPHER_find(lookup, kSuiteId);
  const bool made = cipher != nullptr &&
                    SSL_SESSION_set1_master_key(psk_, Bytes(secret.data()), secret.size()) == 1 &&
                    SSL_SESSION_set_cipher(psk_, cipher) == 1 &&
                    SSL_SESSION_set_protocol_version(psk_, TLS1_3_VERSION) == 1;
  SSL_free(lookup);
  OPENSSL_cleanse(secret.data(), secret.size());
  if (!made) return OpenSslError("the pre-shared key");
  SSL_CTX_set_psk_use_session_callback(ssl_context_, Callbacks::OfferPsk);
  SSL_CTX_set_psk_find_session_callback(ssl_context_, Callbacks::FindPsk);
  return absl::OkStatus();
}

absl::Status TlsContext::UseCertificates() {
  ATOLL_RETURN_IF_ERROR(base::CheckTlsOptions(options_));
  ATOLL_ASSIGN_OR_RETURN(TlsIdentity identity, ReadTlsIdentity(options_));
  SSL_CTX_set1_cert_store(ssl_context_, identity.authorities.get());
  // Fails where OpenSSL's security level refuses it: a short key, a weak hash.
  if (SSL_CTX_use_certificate(ssl_context_, identity.chain[0].get()) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("the certificate ", options_.certificate_file, ": ",
                                                   OpenSslError("it is refused").message()));
  }
  for (size_t i = 1; i < identity.chain.size(); ++i)
    SSL_CTX_add1_chain_cert(ssl_context_, identity.chain[i].get());
  if (SSL_CTX_use_PrivateKey(ssl_context_, identity.key.get()) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the private key ", options_.key_file, ": ", OpenSslError("it is refused").message()));
  }
  return absl::OkStatus();
}

}  // namespace Atoll::transport
