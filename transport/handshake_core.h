// Who is at the other end, before anything else is believed: a challenge and response with the job key.
// Pure: bytes in, bytes out; no sockets, no clock, no randomness of its own.
//
//   client                                               server
//     hello: magic, version, job, name, incarnation,
//            listener, lane, fingerprint, nonce    ------>
//     <------  challenge: name, incarnation, fingerprint, nonce, HMAC("server", all of it)
//          or  refusal: a kind and a text
//     proof: HMAC("client", all of it)             ------>
//
// "All of it" is both nonces, the job, both names and incarnations, listener, lane and both fingerprints,
// each with its length, so that a proof fits one connection, one direction and one purpose: replayed and
// reflected messages fail. The layout of the hello's first 16 bytes and of a refusal never changes, so
// that versions can refuse each other with a text. A HMAC proves who connects; it does not keep what
// follows from someone who sits on the path: that takes TLS. Then all of this runs inside TLS, and "all of it"
// includes what only the two ends of that TLS connection know (BindTo). If one side speaks TLS and the other
// does not, whoever expects the hello refuses with a text, bare.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "atoll/base/ids.h"
#include "atoll/base/tls_options.h"

namespace Atoll::transport {

inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kProofBytes = 32;
/// Of the body of any handshake message.
inline constexpr size_t kMaxHandshakeBody = 4096;
/// The first byte of a refusal that is about TLS: no record of TLS begins with it.
inline constexpr uint8_t kRefuseTls = 5;
/// The first byte of what a client of TLS says.
inline constexpr uint8_t kTlsRecord = 0x16;

using Nonce = std::array<uint8_t, kNonceBytes>;
/// From the operating system's random source.
Nonce NewNonce();

/// What both ends must agree on, and who we are.
struct HandshakeConfig {
  std::string job;
  base::MemberId self;
  std::string key;
  /// Versions, transports and channels in one text; peers with another are refused.
  std::string fingerprint;
  uint32_t version = kProtocolVersion;       ///< Changed by tests only.
  base::TlsMode tls = base::TlsMode::kNone;  ///< For the texts of refusals.
};

/// What a connection is for. `listener`: 0 is TensorPipe's core, 1 and above are lanes of the channel mpt.
/// `lane` is a transport::Lane for the first connection of a pipe, and kNoLane for those that join it.
struct Purpose {
  static constexpr uint8_t kNoLane = 0xff;
  uint8_t listener = 0;
  uint8_t lane = kNoLane;
};

/// One side of one handshake. Used from one thread.
class Handshake {
 public:
  virtual ~Handshake() = default;

  /// Inside TLS: `secret` is what both of its ends know and nobody else. Before the first Feed.
  void BindTo(std::string secret) { binding_ = std::move(secret); }
  /// The peer speaks without TLS what should be inside it: a server reads its hello, and refuses; a client says
  /// nothing, and takes nothing but a refusal. Before the first Feed.
  void ForbidPlain() {
    plain_forbidden_ = true;
    output_.clear();
  }

  /// How many bytes Feed may be given at most now; 0 when finished. Bytes beyond the handshake belong to
  /// TensorPipe, so never more than this is read from the socket.
  size_t wanted() const { return finished_ || !status_.ok() ? 0 : target_ - buffer_.size(); }
  /// Takes 1 to wanted() bytes from the peer.
  void Feed(absl::string_view bytes);
  /// What is to be sent now, in order; empties it. To be sent even when the handshake has failed: it may
  /// hold the text of a refusal.
  std::string TakeOutput() { return std::exchange(output_, std::string()); }
  bool finished() const { return finished_; }
  /// The failure, which is final. Unauthenticated: a wrong key on one side; FailedPrecondition: another
  /// version, job or fingerprint, or TLS on one side only; NotFound: another name or incarnation than expected; InvalidArgument:
  /// these are not our bytes at all.
  const absl::Status& status() const { return status_; }
  /// What it means that the peer hangs up now.
  virtual absl::Status OnHangUp() const {
    return absl::UnavailableError("the peer hung up during the handshake");
  }
  /// The peer, once finished.
  const base::MemberId& peer() const { return peer_; }
  const Purpose& purpose() const { return purpose_; }

 protected:
  Handshake(const HandshakeConfig* config, Nonce nonce) : config_(*config), nonce_(nonce) {}
  /// `buffer_` has `target_` bytes. Sets the next target, finishes or fails.
  virtual void OnMessage(absl::string_view message) = 0;
  /// Called for each prefix of a message, to fail early.
  virtual absl::Status CheckPrefix(absl::string_view) { return absl::OkStatus(); }
  void Fail(absl::Status status) { status_ = std::move(status); }

  std::string Proof(absl::string_view direction, const base::MemberId& client, const base::MemberId& server,
                    const Nonce& client_nonce, const Nonce& server_nonce,
                    absl::string_view client_fingerprint, absl::string_view server_fingerprint) const;

  const HandshakeConfig& config_;  // Outlives this.
  const Nonce nonce_;
  std::string binding_;
  bool plain_forbidden_ = false;
  std::string buffer_;
  size_t target_ = 0;
  std::string output_;
  bool finished_ = false;
  absl::Status status_;
  base::MemberId peer_;
  Purpose purpose_;
};

class ClientHandshake : public Handshake {
 public:
  /// `config` outlives this. An empty name or a zero incarnation of `expected` fits any.
  ClientHandshake(const HandshakeConfig* config, base::MemberId expected, Purpose purpose, Nonce nonce);

 private:
  void OnMessage(absl::string_view message) override;
  void OnChallenge(absl::string_view body);
  void OnRefusal(uint8_t kind, absl::string_view text);

  const base::MemberId expected_;
  enum class Stage { kReplyHead, kReplyBody } stage_ = Stage::kReplyHead;
  uint8_t reply_kind_ = 0;
};

class ServerHandshake : public Handshake {
 public:
  ServerHandshake(const HandshakeConfig* config, Nonce nonce);

  /// Who has another key sees that in our proof, and hangs up: that is worth a line to us too.
  absl::Status OnHangUp() const override {
    if (stage_ != Stage::kProof) return Handshake::OnHangUp();
    return absl::UnauthenticatedError(
        "the peer hung up at our proof of the job key: it has another one, or gave up");
  }

 private:
  void OnMessage(absl::string_view message) override;
  absl::Status CheckPrefix(absl::string_view prefix) override;
  void OnHello(absl::string_view body);
  void OnTlsHead(absl::string_view head);
  void RefuseTls(absl::string_view own_text);
  /// `text` is for the peer, `own_text` for our log.
  void Refuse(uint8_t kind, absl::string_view text, absl::string_view own_text);

  enum class Stage { kHelloHead, kHelloBody, kTlsBody, kProof } stage_ = Stage::kHelloHead;
  uint32_t client_version_ = 0;
  std::string expected_proof_;
};

}  // namespace Atoll::transport
