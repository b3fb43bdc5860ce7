#include "atoll/transport/handshake_core.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/bytes.h"
#include "atoll/base/log.h"
#include "atoll/base/words.h"
#include "atoll/transport/pipe.h"

namespace Atoll::transport {
namespace {

constexpr absl::string_view kMagic("AtollTP\n", 8);
constexpr size_t kHelloHeadBytes = 16;  // Magic, version, length of the body.
constexpr size_t kReplyHeadBytes = 5;   // Kind, length of the body.
constexpr size_t kTlsHeadBytes = 5;     // Of a record: type, version u16, length u16; big-endian.
constexpr size_t kMaxNameBytes = 256;
constexpr size_t kMaxTextBytes = 1024;

constexpr uint8_t kChallenge = 1;
constexpr uint8_t kRefuseVersion = 2;
constexpr uint8_t kRefuseJob = 3;
constexpr uint8_t kRefuseFingerprint = 4;

absl::string_view View(const Nonce& nonce) {
  return {reinterpret_cast<const char*>(nonce.data()), nonce.size()};
}

Nonce NonceOf(absl::string_view bytes) {
  Nonce nonce{};
  if (bytes.size() == nonce.size()) std::memcpy(nonce.data(), bytes.data(), nonce.size());
  return nonce;
}

/// A stranger's text may end in a log: one line, printable.
std::string Printable(absl::string_view text) {
  std::string result(text.substr(0, kMaxTextBytes));
  for (char& c : result) {
    if (!absl::ascii_isprint(c)) c = '?';
  }
  return result;
}

bool SameBytes(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

Nonce NewNonce() {
  Nonce nonce;
  ATOLL_CHECK(RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1)
      << "the system's random source failed";
  return nonce;
}

void Handshake::Feed(absl::string_view bytes) {
  ATOLL_CHECK(bytes.size() <= wanted()) << "bytes beyond the handshake";
  buffer_.append(bytes.data(), bytes.size());
  absl::Status early = CheckPrefix(buffer_);
  if (!early.ok()) {
    Fail(std::move(early));
    return;
  }
  if (buffer_.size() < target_) return;
  const std::string message = std::exchange(buffer_, std::string());
  OnMessage(message);
}

std::string Handshake::Proof(absl::string_view direction, const base::MemberId& client,
                             const base::MemberId& server, const Nonce& client_nonce,
                             const Nonce& server_nonce, absl::string_view client_fingerprint,
                             absl::string_view server_fingerprint) const {
  base::ByteWriter text;
  text.PutString("atoll transport handshake");
  text.PutString(direction);
  text.Put(config_.version);
  text.PutString(config_.job);
  text.PutString(client.name);
  text.Put(client.incarnation.value());
  text.PutString(server.name);
  text.Put(server.incarnation.value());
  text.Put(purpose_.listener);
  text.Put(purpose_.lane);
  text.PutString(View(client_nonce));
  text.PutString(View(server_nonce));
  text.PutString(client_fingerprint);
  text.PutString(server_fingerprint);
  if (!binding_.empty()) text.PutString(binding_);
  const std::string bytes = std::move(text).Take();
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), config_.key.data(), static_cast<int>(config_.key.size()),
           reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest, &size);
  ATOLL_CHECK(made != nullptr && size == kProofBytes) << "HMAC-SHA256 failed";
  return std::string(reinterpret_cast<const char*>(digest), size);
}

ClientHandshake::ClientHandshake(const HandshakeConfig* config, base::MemberId expected, Purpose purpose,
                                 Nonce nonce)
    : Handshake(config, nonce), expected_(std::move(expected)) {
  purpose_ = purpose;
  base::ByteWriter body;
  body.PutString(config_.job);
  body.PutString(config_.self.name);
  body.Put(config_.self.incarnation.value());
  body.Put(purpose.listener);
  body.Put(purpose.lane);
  body.PutString(config_.fingerprint);
  body.PutRaw(View(nonce_));
  const std::string bytes = std::move(body).Take();
  base::ByteWriter hello;
  hello.PutRaw(kMagic);
  hello.Put(config_.version);
  hello.Put(static_cast<uint32_t>(bytes.size()));
  hello.PutRaw(bytes);
  output_ = std::move(hello).Take();
  target_ = kReplyHeadBytes;
}

void ClientHandshake::OnMessage(absl::string_view message) {
  if (stage_ == Stage::kReplyBody) {
    if (reply_kind_ == kChallenge) return OnChallenge(message);
    return OnRefusal(reply_kind_, message);
  }
  base::ByteReader reader(message);
  reply_kind_ = reader.Get<uint8_t>();
  const uint32_t size = reader.Get<uint32_t>();
  if (plain_forbidden_ && reply_kind_ == kChallenge) {
    return Fail(absl::FailedPreconditionError("a challenge without the TLS that was asked for"));
  }
  if (reply_kind_ < kChallenge || reply_kind_ > kRefuseTls || size > kMaxHandshakeBody || size == 0) {
    return Fail(absl::InvalidArgumentError("what answers there is not an Atoll endpoint"));
  }
  stage_ = Stage::kReplyBody;
  target_ = size;
}

void ClientHandshake::OnRefusal(uint8_t kind, absl::string_view text) {
  const std::string what =
      kind == kRefuseVersion ? absl::StrCat("another protocol version, ours is ", config_.version)
      : kind == kRefuseJob   ? "another job"
      : kind == kRefuseTls
          ? absl::StrCat("TLS on one side only, ours is --tls=", base::TlsModeName(config_.tls))
          : "another build";
  Fail(absl::FailedPreconditionError(absl::StrCat("refused (", what, "): ", Printable(text))));
}

void ClientHandshake::OnChallenge(absl::string_view body) {
  base::ByteReader reader(body);
  base::MemberId server;
  server.name = std::string(reader.GetString(kMaxNameBytes));
  server.incarnation = base::Incarnation(reader.Get<uint64_t>());
  const std::string fingerprint(reader.GetString(kMaxTextBytes));
  const Nonce server_nonce = NonceOf(reader.GetRaw(kNonceBytes));
  const absl::string_view proof = reader.GetRaw(kProofBytes);
  if (absl::Status whole = reader.Finish(); !whole.ok()) {
    return Fail(absl::InvalidArgumentError(absl::StrCat("a malformed challenge: ", whole.message())));
  }
  if (!base::IsWord(server.name, base::kMaxMemberNameBytes))
    return Fail(absl::InvalidArgumentError("a challenge of an odd name"));
  const std::string right =
      Proof("server", config_.self, server, nonce_, server_nonce, config_.fingerprint, fingerprint);
  if (!SameBytes(proof, right)) {
    return Fail(absl::UnauthenticatedError("it does not have our job key (or we have a wrong one)"));
  }
  if (fingerprint != config_.fingerprint) {
    return Fail(absl::FailedPreconditionError(absl::StrCat("another build: it has '", Printable(fingerprint),
                                                           "', we have '", config_.fingerprint, "'")));
  }
  if ((!expected_.name.empty() && expected_.name != server.name) ||
      (expected_.incarnation.value() != 0 && expected_.incarnation != server.incarnation)) {
    return Fail(absl::NotFoundError(
        absl::StrCat("there is ", Printable(server.ToString()), ", not ",
                     expected_.incarnation.value() != 0 ? expected_.ToString() : expected_.name)));
  }
  output_ += Proof("client", config_.self, server, nonce_, server_nonce, config_.fingerprint, fingerprint);
  peer_ = std::move(server);
  finished_ = true;
}

ServerHandshake::ServerHandshake(const HandshakeConfig* config, Nonce nonce) : Handshake(config, nonce) {
  target_ = kHelloHeadBytes;
}

absl::Status ServerHandshake::CheckPrefix(absl::string_view prefix) {
  if (stage_ != Stage::kHelloHead) return absl::OkStatus();
  if (static_cast<uint8_t>(prefix[0]) == kTlsRecord && (prefix.size() < 2 || prefix[1] == 3)) {
    return absl::OkStatus();  // TLS, whose hello is read before it is refused.
  }
  const size_t size = std::min(prefix.size(), kMagic.size());
  if (prefix.substr(0, size) == kMagic.substr(0, size)) return absl::OkStatus();
  return absl::InvalidArgumentError("not an Atoll handshake");
}

void ServerHandshake::Refuse(uint8_t kind, absl::string_view text, absl::string_view own_text) {
  base::ByteWriter refusal;
  refusal.Put(kind);
  refusal.PutString(text);
  output_ += std::move(refusal).Take();
  Fail(absl::FailedPreconditionError(own_text));
}

void ServerHandshake::RefuseTls(absl::string_view own_text) {
  constexpr absl::string_view kRight = "all processes of a job should have the same --tls (ATOLL_TLS)";
  const std::string ours = absl::StrCat("--tls=", base::TlsModeName(config_.tls));
  Refuse(kRefuseTls, absl::StrCat("this endpoint has ", ours, "; ", kRight),
         absl::StrCat(own_text, ", we have ", ours, ": ", kRight));
}

void ServerHandshake::OnTlsHead(absl::string_view head) {
  const size_t size = static_cast<uint8_t>(head[3]) * 256u + static_cast<uint8_t>(head[4]);
  if (size > kMaxHandshakeBody || size <= head.size() - kTlsHeadBytes)
    return Fail(absl::InvalidArgumentError("a TLS hello of a wild length"));
  stage_ = Stage::kTlsBody;
  target_ = size - (head.size() - kTlsHeadBytes);
}

void ServerHandshake::OnMessage(absl::string_view message) {
  switch (stage_) {
    case Stage::kHelloHead: {
      if (static_cast<uint8_t>(message[0]) == kTlsRecord) return OnTlsHead(message);
      base::ByteReader reader(message);
      reader.GetRaw(kMagic.size());
      client_version_ = reader.Get<uint32_t>();
      const uint32_t size = reader.Get<uint32_t>();
      if (size > kMaxHandshakeBody || size == 0)
        return Fail(absl::InvalidArgumentError("a hello of a wild length"));
      stage_ = Stage::kHelloBody;
      target_ = size;
      return;
    }
    case Stage::kHelloBody:
      return OnHello(message);
    case Stage::kTlsBody:
      return RefuseTls("the peer speaks TLS");
    case Stage::kProof:
      if (!SameBytes(message, expected_proof_)) {
        return Fail(absl::UnauthenticatedError("the peer does not have the job key"));
      }
      finished_ = true;
      return;
  }
}

void ServerHandshake::OnHello(absl::string_view body) {
  // The body is read before a refusal: closing with unread input would destroy the text on its way.
  if (client_version_ != config_.version) {
    const std::string text = absl::StrCat("protocol version ", client_version_, " was offered, ",
                                          config_.self.name, " speaks ", config_.version);
    return Refuse(kRefuseVersion, text, text);
  }
  base::ByteReader reader(body);
  const absl::string_view job = reader.GetString(kMaxNameBytes);
  peer_.name = std::string(reader.GetString(kMaxNameBytes));
  peer_.incarnation = base::Incarnation(reader.Get<uint64_t>());
  purpose_.listener = reader.Get<uint8_t>();
  purpose_.lane = reader.Get<uint8_t>();
  const absl::string_view fingerprint = reader.GetString(kMaxTextBytes);
  const Nonce client_nonce = NonceOf(reader.GetRaw(kNonceBytes));
  if (absl::Status whole = reader.Finish(); !whole.ok()) {
    return Fail(absl::InvalidArgumentError(absl::StrCat("a malformed hello: ", whole.message())));
  }
  if (!base::IsWord(peer_.name, base::kMaxMemberNameBytes))
    return Fail(absl::InvalidArgumentError("a hello of an odd name"));
  if (purpose_.lane != Purpose::kNoLane && purpose_.lane > static_cast<uint8_t>(Lane::kBulk)) {
    return Fail(absl::InvalidArgumentError("a hello for no lane of ours"));
  }
  if (job != config_.job) {
    // Our own job's id is not told to a stranger.
    return Refuse(kRefuseJob,
                  absl::StrCat("job '", Printable(job), "' was asked for, this endpoint serves another job"),
                  absl::StrCat("job '", Printable(job), "' was asked for, we serve '", config_.job, "'"));
  }
  if (plain_forbidden_) return RefuseTls("the peer speaks without TLS");
  if (fingerprint != config_.fingerprint) {
    return Refuse(kRefuseFingerprint,
                  absl::StrCat("it has '", config_.fingerprint, "', we have '", Printable(fingerprint), "'"),
                  absl::StrCat("build '", Printable(fingerprint), "' was offered, we have '",
                               config_.fingerprint, "'"));
  }
  base::ByteWriter challenge;
  challenge.PutString(config_.self.name);
  challenge.Put(config_.self.incarnation.value());
  challenge.PutString(config_.fingerprint);
  challenge.PutRaw(View(nonce_));
  challenge.PutRaw(
      Proof("server", peer_, config_.self, client_nonce, nonce_, fingerprint, config_.fingerprint));
  const std::string bytes = std::move(challenge).Take();
  base::ByteWriter reply;
  reply.Put(kChallenge);
  reply.PutString(bytes);
  output_ += std::move(reply).Take();
  expected_proof_ =
      Proof("client", peer_, config_.self, client_nonce, nonce_, fingerprint, config_.fingerprint);
  stage_ = Stage::kProof;
  target_ = kProofBytes;
}

}  // namespace Atoll::transport
