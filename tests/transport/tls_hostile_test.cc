// Whatever arrives where TLS is expected, nobody else is disturbed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/tests/transport/tls_ends.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::transport::testing {
namespace {

using ::testing::HasSubstr;

/// What a client of TLS says first.
std::string HelloOf(const base::TlsOptions& options) {
  Ends ends(ContextOf(options), ContextOf(options));
  EXPECT_TRUE(ends.client->tls.Handshake(ends.client->fd.get()).ok());
  std::string bytes(16 << 10, '\0');
  const ssize_t got = recv(ends.server->fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(std::max<ssize_t>(got, 0));
  EXPECT_GT(bytes.size(), 100u);
  return bytes;
}

class TlsStrangers : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    EndpointOptions options = Options("server", GetParam());
    options.clock = &clock_;
    options.handshake_limit = kHandshakeLimit;
    options.max_unauthenticated = 64;
    server_ = std::make_unique<Member>(options);
    client_ = std::make_unique<Member>(Options("client", GetParam()));
    address_ = server_->endpoint().addresses()[0];
    auto pipe = client_->Connect(*server_);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    near_ = *pipe;
    far_ = server_->Accepted();
    ASSERT_NE(far_, nullptr);
    // All connections of the pipe are there once tensors have passed both ways: none ends with the clock.
    for (Pipe* from : {near_.get(), far_.get()}) {
      std::vector<std::string> tensors{Pattern(300000, 1)};
      auto written = StartWrite(*from, MessageOf("hello", tensors));
      ASSERT_TRUE(Receive(from == near_.get() ? *far_ : *near_).ok());
      ASSERT_TRUE(written.Wait(kLimit).ok());
    }
  }
  void TearDown() override {
    // Nobody else was disturbed, and new ones come in.
    EXPECT_TRUE(Write(*near_, {"still here", {}, {}}).ok());
    EXPECT_TRUE(ReadDescriptor(*far_).ok());
    Member newcomer(Options("newcomer", GetParam()));
    auto pipe = newcomer.Connect(*server_);
    EXPECT_TRUE(pipe.ok()) << pipe.status();
  }
  uint64_t refused() { return server_->endpoint().counters().refused; }
  /// Of a stranger that speaks TLS.
  static void Establish(Tls& tls, const RawSocket& socket) {
    fcntl(socket.fd(), F_SETFL, fcntl(socket.fd(), F_GETFL) | O_NONBLOCK);
    EXPECT_TRUE(Poll([&] {
      EXPECT_TRUE(tls.Handshake(socket.fd()).ok());
      return tls.established();
    }));
  }
  void ExpectRefused(uint64_t count) {
    EXPECT_TRUE(Poll([&] { return refused() >= count; }));
    EXPECT_EQ(refused(), count);
  }

  static constexpr absl::Duration kHandshakeLimit = absl::Seconds(30);
  base::FakeClock clock_;
  std::unique_ptr<Member> server_, client_;
  std::shared_ptr<Pipe> near_, far_;
  std::string address_;
};

TEST_P(TlsStrangers, HttpAndJunkAreDropped) {
  std::mt19937_64 random(1);
  const std::string hello = HelloOf(server_->options().tls);
  uint64_t count = 0;
  auto send = [&](const std::string& bytes) {
    RawSocket socket(address_);
    socket.Send(bytes);
    EXPECT_TRUE(socket.SeesTheEnd()) << count;
    ++count;
  };
  for (int i = 0; i < 50; ++i) {
    send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    std::string junk(1 + random() % 5000, '\0');
    for (char& c : junk) c = static_cast<char>(random());
    if (junk[0] == 0x16) junk[0] = 0x17;
    send(junk);
    // As TLS, but only at first.
    send(std::string("\x16\x03\x01\x00\x50", 5) + Pattern(0x50, i + 1));
    std::string changed = hello;
    changed[9 + random() % 30] ^= 0xff;
    changed[44] = '\xff';
    changed += Pattern(2000, i);
    send(changed);
  }
  ExpectRefused(count);
}

TEST_P(TlsStrangers, HalvesOfHandshakesEndAtTheLimit) {
  const std::string hello = HelloOf(server_->options().tls);
  std::vector<std::unique_ptr<RawSocket>> sockets;
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{5}, size_t{100}, hello.size() - 1, hello.size()}) {
    sockets.push_back(std::make_unique<RawSocket>(address_));
    sockets.back()->Send(hello.substr(0, bytes));
  }
  // The whole hello is answered, which shows that all of them were taken.
  EXPECT_EQ(sockets.back()->Receive(5).substr(0, 3), "\x16\x03\x03");
  for (size_t i = 0; i + 1 < sockets.size(); ++i) EXPECT_TRUE(sockets[i]->Open()) << i;
  // A byte now and then gains nothing.
  clock_.Advance(kHandshakeLimit / 2);
  sockets[2]->Send(hello.substr(5, 1));
  clock_.Advance(kHandshakeLimit / 2 + absl::Seconds(1));
  for (auto& socket : sockets) EXPECT_TRUE(socket->SeesTheEnd());
  ExpectRefused(sockets.size());
}

TEST_P(TlsStrangers, SilenceInsideTlsEndsAtTheLimit) {
  RawSocket socket(address_);
  Traffic traffic;
  Tls tls(ContextOf(server_->options().tls), Tls::Side::kClient, &traffic);
  Establish(tls, socket);
  char byte;
  const iovec into{&byte, 1};
  // In vain: the server awaits the job key's handshake.
  EXPECT_EQ(tls.Receive(socket.fd(), &into, 1), -1);
  clock_.Advance(kHandshakeLimit + absl::Seconds(1));
  EXPECT_TRUE(socket.SeesTheEnd());
  ExpectRefused(1);
}

TEST_P(TlsStrangers, JunkInsideTlsIsDropped) {
  for (int i = 0; i < 10; ++i) {
    RawSocket socket(address_);
    Traffic traffic;
    Tls tls(ContextOf(server_->options().tls), Tls::Side::kClient, &traffic);
    Establish(tls, socket);
    std::string junk = i == 0 ? "GET / HTTP/1.1\r\n\r\n" : Pattern(3000, i);
    const iovec from{junk.data(), junk.size()};
    EXPECT_GT(tls.Send(socket.fd(), &from, 1), 0);
    EXPECT_TRUE(socket.SeesTheEnd());
  }
  ExpectRefused(10);
}

TEST_P(TlsStrangers, ManyIdleOnesMakeRoomForTheHonest) {
  std::vector<std::unique_ptr<RawSocket>> idle;
  const std::string hello = HelloOf(server_->options().tls);
  for (int i = 0; i < 200; ++i) {
    idle.push_back(std::make_unique<RawSocket>(address_));
    idle.back()->Send(hello.substr(0, 50));
  }
  for (int i = 0; i < 130; ++i) EXPECT_TRUE(idle[i]->SeesTheEnd()) << i;
}

INSTANTIATE_TEST_SUITE_P(Modes, TlsStrangers, ::testing::Values(Way::kTcpPsk, Way::kTcpCert),
                         [](const auto& info) { return WayName(info.param); });

TEST(TlsStrangersOfClients, AServiceWithoutTlsIsAClearError) {
  Member client(Options("client", Way::kTcpPsk));
  const std::vector<std::pair<std::string, std::string>> answers = {
      {"HTTP/1.1 400 Bad Request\r\n\r\n", "not TLS as an Atoll endpoint speaks it"},
      {"SSH-2.0-OpenSSH\r\n", "not TLS as an Atoll endpoint speaks it"},
      {"", "hung up during the TLS handshake"},
      // A challenge where TLS was asked for, and a refusal that is none.
      {std::string("\x01\x20\x00\x00\x00", 5) + std::string(32, 'x'),
       "not TLS as an Atoll endpoint speaks it"},
      {std::string("\x05\xff\xff\xff\xff", 5), "not an Atoll endpoint"},
      {std::string("\x05\x06\x00\x00\x00pl\nain", 11), "TLS on one side only, ours is --tls=psk): pl?ain"},
  };
  for (const auto& [answer, text] : answers) {
    RawListener service(Way::kTcp4);
    std::thread thread([&service, answer = answer] {
      RawSocket socket(service.Accept());
      char hello[4096];  // All of it: what is not read would reset the connection.
      EXPECT_GT(recv(socket.fd(), hello, sizeof(hello), 0), 100);
      socket.Send(answer);
      if (!answer.empty()) socket.SeesTheEnd();
    });
    auto pipe = client.Connect({service.address()});
    EXPECT_FALSE(pipe.ok());
    EXPECT_FALSE(absl::IsDeadlineExceeded(pipe.status())) << pipe.status();
    EXPECT_THAT(Message(pipe.status()), HasSubstr(text));
    thread.join();
  }
}

}  // namespace
}  // namespace Atoll::transport::testing
