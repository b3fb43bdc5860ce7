#include "atoll/transport/handshake_core.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace Atoll::transport {
namespace {

Nonce NonceOf(uint8_t byte) {
  Nonce nonce;
  nonce.fill(byte);
  return nonce;
}

class HandshakeTest : public ::testing::Test {
 protected:
  HandshakeTest() {
    server_ = {"job", {"server", base::Incarnation(11)}, std::string(32, 'k'), "torch X", kProtocolVersion};
    client_ = {"job", {"client", base::Incarnation(22)}, std::string(32, 'k'), "torch X", kProtocolVersion};
  }
  ClientHandshake Client(base::MemberId expected = {}, Purpose purpose = {0, 1}) {
    return ClientHandshake(&client_, std::move(expected), purpose, NonceOf(1));
  }
  ServerHandshake Server() { return ServerHandshake(&server_, NonceOf(2)); }

  /// Feeds at most `chunk` bytes at a time; stops at an end or a failure. Returns what was not wanted.
  static std::string Give(Handshake& to, std::string bytes, size_t chunk = 4096) {
    while (!bytes.empty() && to.wanted() > 0) {
      const size_t size = std::min({chunk, bytes.size(), to.wanted()});
      to.Feed(absl::string_view(bytes).substr(0, size));
      bytes.erase(0, size);
    }
    return bytes;
  }
  static void Run(Handshake& client, Handshake& server, size_t chunk = 4096) {
    for (int i = 0; i < 4; ++i) {
      Give(server, client.TakeOutput(), chunk);
      Give(client, server.TakeOutput(), chunk);
    }
  }

  HandshakeConfig server_, client_;
};

TEST_F(HandshakeTest, BothLearnTheOther) {
  for (size_t chunk : {1u, 3u, 4096u}) {
    auto client = Client({"server", base::Incarnation(11)});
    auto server = Server();
    Run(client, server, chunk);
    ASSERT_TRUE(client.finished()) << client.status();
    ASSERT_TRUE(server.finished()) << server.status();
    EXPECT_EQ(client.peer(), server_.self);
    EXPECT_EQ(server.peer(), client_.self);
    EXPECT_EQ(server.purpose().listener, 0);
    EXPECT_EQ(server.purpose().lane, 1);
    EXPECT_EQ(client.wanted(), 0u);
    EXPECT_EQ(server.wanted(), 0u);
  }
}

TEST_F(HandshakeTest, BytesBehindTheProofAreNotWanted) {
  auto client = Client();
  auto server = Server();
  Give(server, client.TakeOutput());
  Give(client, server.TakeOutput());
  EXPECT_EQ(Give(server, client.TakeOutput() + "TensorPipe"), "TensorPipe");
  EXPECT_TRUE(server.finished());
}

TEST_F(HandshakeTest, InsideTlsItFitsThatConnectionAlone) {
  const std::pair<std::string, std::string> channels[] = {
      {"one", "one"}, {"one", "another"}, {"one", ""}, {"", "one"}};
  for (const auto& [of_client, of_server] : channels) {
    auto client = Client();
    auto server = Server();
    client.BindTo(of_client);
    server.BindTo(of_server);
    Run(client, server);
    EXPECT_EQ(client.finished() && server.finished(), of_client == of_server);
    EXPECT_EQ(absl::IsUnauthenticated(client.status()), of_client != of_server) << client.status();
  }
}

TEST_F(HandshakeTest, AServerOfTlsRefusesAPlainHelloWithAText) {
  server_.tls = base::TlsMode::kPsk;
  auto client = Client();
  auto server = Server();
  server.ForbidPlain();
  Run(client, server);
  EXPECT_TRUE(absl::IsFailedPrecondition(server.status())) << server.status();
  EXPECT_TRUE(absl::StrContains(server.status().message(), "the peer speaks without TLS, we have --tls=psk"));
  EXPECT_TRUE(absl::IsFailedPrecondition(client.status())) << client.status();
  EXPECT_TRUE(absl::StrContains(client.status().message(), "ours is --tls=none"));
  EXPECT_TRUE(absl::StrContains(client.status().message(), "this endpoint has --tls=psk"));
}

TEST_F(HandshakeTest, APlainServerRefusesAHelloOfTlsOnceItIsRead) {
  std::string hello("\x16\x03\x01\x00\xc8", 5);
  hello += std::string(200, 'x');
  for (size_t chunk : {1u, 7u, 4096u}) {
    auto server = Server();
    Give(server, hello.substr(0, hello.size() - 1), chunk);
    EXPECT_TRUE(server.status().ok()) << server.status();
    EXPECT_EQ(server.TakeOutput(), "");
    Give(server, hello.substr(hello.size() - 1));
    EXPECT_TRUE(absl::IsFailedPrecondition(server.status())) << server.status();
    // A client of TLS tells it by its first byte, sends nothing of its own, and takes it.
    client_.tls = base::TlsMode::kCert;
    auto client = Client();
    client.ForbidPlain();
    EXPECT_EQ(client.TakeOutput(), "");
    const std::string refusal = server.TakeOutput();
    EXPECT_EQ(static_cast<uint8_t>(refusal[0]), kRefuseTls);
    Give(client, refusal, chunk);
    EXPECT_TRUE(absl::IsFailedPrecondition(client.status())) << client.status();
    EXPECT_TRUE(absl::StrContains(client.status().message(), "this endpoint has --tls=none"));
  }
  for (const std::string& wild :
       {std::string("\x16\x03\x01\xff\xff", 5), std::string("\x16\x03\x01\x00\x03", 5),
        std::string("\x16\x04\x01\x00\xc8", 5)}) {
    auto server = Server();
    Give(server, wild + std::string(100, 'x'));
    EXPECT_TRUE(absl::IsInvalidArgument(server.status())) << server.status();
    EXPECT_EQ(server.TakeOutput(), "");
  }
}

TEST_F(HandshakeTest, WhoAskedForTlsTakesNoChallengeWithoutIt) {
  auto client = Client();
  auto server = Server();
  Give(server, client.TakeOutput());
  auto careful = Client();
  careful.ForbidPlain();
  Give(careful, server.TakeOutput());
  EXPECT_TRUE(absl::IsFailedPrecondition(careful.status())) << careful.status();
  EXPECT_EQ(careful.TakeOutput(), "");
}

TEST_F(HandshakeTest, WrongKey) {
  client_.key[5] ^= 1;
  auto client = Client();
  auto server = Server();
  Run(client, server);
  EXPECT_TRUE(absl::IsUnauthenticated(client.status())) << client.status();
  EXPECT_FALSE(server.finished());
}

TEST_F(HandshakeTest, AClientWithoutTheKeyCannotProve) {
  auto client = Client();
  auto server = Server();
  Give(server, client.TakeOutput());
  Give(server, std::string(kProofBytes, 'x'));
  EXPECT_TRUE(absl::IsUnauthenticated(server.status())) << server.status();
  EXPECT_FALSE(server.finished());
}

TEST_F(HandshakeTest, AnotherJobVersionOrBuildIsRefusedWithAText) {
  {
    auto config = client_;
    config.job = "other";
    ClientHandshake client(&config, {}, {}, NonceOf(1));
    auto server = Server();
    Run(client, server);
    EXPECT_TRUE(absl::IsFailedPrecondition(client.status())) << client.status();
    EXPECT_TRUE(absl::StrContains(client.status().message(), "another job")) << client.status();
    EXPECT_FALSE(absl::StrContains(client.status().message(), "'job'")) << "tells a stranger our job's id";
    EXPECT_TRUE(absl::IsFailedPrecondition(server.status()));
  }
  {
    auto config = client_;
    config.version = 7;
    ClientHandshake client(&config, {}, {}, NonceOf(1));
    auto server = Server();
    Run(client, server);
    EXPECT_TRUE(absl::IsFailedPrecondition(client.status())) << client.status();
    EXPECT_TRUE(absl::StrContains(client.status().message(), "version 7")) << client.status();
    EXPECT_FALSE(server.finished());
  }
  {
    auto config = client_;
    config.fingerprint = "torch Y";
    ClientHandshake client(&config, {}, {}, NonceOf(1));
    auto server = Server();
    Run(client, server);
    EXPECT_TRUE(absl::IsFailedPrecondition(client.status())) << client.status();
    EXPECT_TRUE(absl::StrContains(client.status().message(), "'torch X', we have 'torch Y'"))
        << client.status();
    EXPECT_FALSE(server.finished());
  }
}

TEST_F(HandshakeTest, AnotherNameOrIncarnationIsNotFound) {
  for (const base::MemberId& expected :
       {base::MemberId{"somebody", {}}, base::MemberId{"server", base::Incarnation(12)}}) {
    auto client = Client(expected);
    auto server = Server();
    Run(client, server);
    EXPECT_TRUE(absl::IsNotFound(client.status())) << client.status();
    EXPECT_FALSE(server.finished());
  }
  auto client = Client({"server", {}});
  auto server = Server();
  Run(client, server);
  EXPECT_TRUE(client.finished()) << client.status();
}

TEST_F(HandshakeTest, AReplayedClientFails) {
  auto client = Client();
  auto server = Server();
  const std::string hello = client.TakeOutput();
  Give(server, hello);
  Give(client, server.TakeOutput());
  const std::string proof = client.TakeOutput();
  Give(server, proof);
  ASSERT_TRUE(server.finished());

  ServerHandshake again(&server_, NonceOf(3));  // The next connection has another nonce.
  Give(again, hello);
  Give(again, proof);
  EXPECT_TRUE(absl::IsUnauthenticated(again.status())) << again.status();
}

TEST_F(HandshakeTest, AReplayedServerFails) {
  auto client = Client();
  auto server = Server();
  Give(server, client.TakeOutput());
  const std::string challenge = server.TakeOutput();
  ClientHandshake again(&client_, {}, {0, 1}, NonceOf(3));
  (void)again.TakeOutput();
  Give(again, challenge);
  EXPECT_TRUE(absl::IsUnauthenticated(again.status())) << again.status();
}

TEST_F(HandshakeTest, AReflectedProofFails) {
  // The stranger sends the server's own HMAC back as its proof.
  auto client = Client();
  auto server = Server();
  Give(server, client.TakeOutput());
  const std::string challenge = server.TakeOutput();
  Give(server, challenge.substr(challenge.size() - kProofBytes));
  EXPECT_TRUE(absl::IsUnauthenticated(server.status())) << server.status();
}

TEST_F(HandshakeTest, AProofIsForOnePurposeAndOneName) {
  // Someone on the path changes one field of the hello: lane, listener, name or incarnation.
  auto client = Client();
  const std::string hello = client.TakeOutput();
  for (size_t at = 16; at < hello.size() - kNonceBytes; ++at) {
    std::string changed = hello;
    changed[at] ^= 1;
    auto server = Server();
    Give(server, changed);
    auto victim = Client();
    (void)victim.TakeOutput();
    Give(victim, server.TakeOutput());
    EXPECT_FALSE(victim.finished()) << "byte " << at;
  }
}

TEST_F(HandshakeTest, AChangedChallengeFails) {
  auto client = Client();
  auto server = Server();
  Give(server, client.TakeOutput());
  const std::string challenge = server.TakeOutput();
  for (size_t at = 0; at < challenge.size(); ++at) {
    for (int bit : {0, 7}) {
      std::string changed = challenge;
      changed[at] ^= static_cast<char>(1 << bit);
      auto victim = Client();
      (void)victim.TakeOutput();
      Give(victim, changed);
      EXPECT_FALSE(victim.finished()) << "byte " << at;
    }
  }
}

// Scenario users 148.
TEST_F(HandshakeTest, StrangersAreKnownByTheirFirstByte) {
  auto server = Server();
  server.Feed("G");
  EXPECT_TRUE(absl::IsInvalidArgument(server.status()));
  EXPECT_EQ(server.wanted(), 0u);
  EXPECT_EQ(server.TakeOutput(), "");  // Not one byte for them.
  auto client = Client();
  (void)client.TakeOutput();
  Give(client, "HTTP/1.1 400 Bad Request\r\n");
  EXPECT_TRUE(absl::IsInvalidArgument(client.status())) << client.status();
}

TEST_F(HandshakeTest, ANameThatWouldForgeALogIsRefused) {
  for (const std::string& name :
       {std::string("two\nlines"), std::string("\x1b[31m"), std::string("\xc2\x9b", 2),
        std::string("zero\0", 5), std::string(), std::string(257, 'n')}) {
    client_.self.name = name;
    auto client = Client();
    auto server = Server();
    Run(client, server);
    EXPECT_TRUE(absl::IsInvalidArgument(server.status())) << server.status();
    client_.self.name = "client";
    server_.self.name = name;
    auto to_odd = Client();
    auto odd = Server();
    Run(to_odd, odd);
    EXPECT_TRUE(absl::IsInvalidArgument(to_odd.status())) << to_odd.status();
    server_.self.name = "server";
  }
}

TEST_F(HandshakeTest, LengthsAreBounded) {
  const std::string hello = Client().TakeOutput();
  for (uint32_t length : {0u, 4097u, 0xffffffffu, 0x80000000u}) {
    std::string changed = hello;
    std::memcpy(&changed[12], &length, 4);
    auto server = Server();
    Give(server, changed.substr(0, 16));
    EXPECT_TRUE(absl::IsInvalidArgument(server.status())) << length;
  }
  // A body of any shorter length is malformed.
  const uint32_t whole = hello.size() - 16;
  for (uint32_t length = 1; length < whole; ++length) {
    std::string changed = hello.substr(0, 16 + length);
    std::memcpy(&changed[12], &length, 4);
    auto server = Server();
    Give(server, changed);
    EXPECT_FALSE(server.status().ok()) << length;
  }
}

TEST_F(HandshakeTest, ARefusalsTextIsMadePrintable) {
  auto client = Client();
  (void)client.TakeOutput();
  const std::string text = "line\nESC\x1b[31m";
  std::string refusal("\x03", 1);
  const uint32_t size = text.size();
  refusal.append(reinterpret_cast<const char*>(&size), 4);
  Give(client, refusal + text);
  EXPECT_TRUE(absl::IsFailedPrecondition(client.status()));
  EXPECT_TRUE(absl::StrContains(client.status().message(), "line?ESC?[31m")) << client.status();
}

}  // namespace
}  // namespace Atoll::transport
