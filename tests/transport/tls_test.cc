// TLS on connections: who gets in, what is said to who does not, and what someone on the path can do.
#include "atoll/transport/tls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <atomic>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "atoll/tests/transport/certificates.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/tests/transport/tls_ends.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::transport::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsTest : public ::testing::TestWithParam<Way> {
 protected:
  base::TlsOptions tls() const { return Options("any", GetParam()).tls; }
  Ends Established() {
    Ends ends(ContextOf(tls()), ContextOf(tls()));
    ends.Greet();
    EXPECT_TRUE(ends.client_status.ok()) << ends.client_status;
    EXPECT_TRUE(ends.server_status.ok()) << ends.server_status;
    EXPECT_TRUE(ends.client->tls.established());
    EXPECT_TRUE(ends.server->tls.established());
    return ends;
  }
};

TEST_P(TlsTest, TheEndsOfOneConnectionAndNoOthersShareASecret) {
  Ends one = Established(), another = Established();
  EXPECT_EQ(one.client->tls.Binding(), one.server->tls.Binding());
  EXPECT_EQ(one.client->tls.Binding().size(), 32u);
  EXPECT_NE(one.client->tls.Binding(), another.client->tls.Binding());
}

TEST_P(TlsTest, BytesOfAllSizesPassWhateverTheSocketTakes) {
  Ends ends = Established();
  const std::string sent = Pattern(3 << 20, 7);
  std::string got;
  size_t put = 0;
  int full = 0;
  std::mt19937_64 random(1);
  size_t piece = 1;
  while (got.size() < sent.size()) {
    // As sendmsg: what was not reported is given again, in other pieces.
    const iovec parts[2] = {{const_cast<char*>(&sent[put]), std::min(piece, sent.size() - put)},
                            {const_cast<char*>(&sent[std::min(put + piece, sent.size())]),
                             sent.size() - std::min(put + piece, sent.size())}};
    const ssize_t count = put < sent.size() ? ends.client->tls.Send(ends.client->fd.get(), parts, 2) : 0;
    if (count > 0) put += count, piece = 1 + random() % 40000;
    if (count < 0) {
      ASSERT_EQ(errno, EAGAIN) << ends.client->tls.failure();
      ++full;
    }
    got += ends.server->Take(1 + random() % 100000);
    ASSERT_TRUE(ends.server->result > 0 || ends.server->error == EAGAIN) << ends.server->tls.failure();
  }
  EXPECT_TRUE(got == sent);
  EXPECT_GT(full, 0);
  EXPECT_FALSE(ends.server->tls.AtEnd(ends.server->fd.get()));
}

TEST_P(TlsTest, KeysAreReplacedInTime) {
  auto context = ContextOf(tls());
  context->set_records_per_key_for_test(3);
  Ends ends(context, ContextOf(tls()));
  ends.Greet();
  uint64_t bytes_before = ends.client->traffic.bytes_sent.load();
  for (int i = 0; i < 100; ++i) {
    const std::string text = Pattern(1000, i);
    ASSERT_EQ(ends.client->Put(text), 1000);
    ASSERT_TRUE(ends.server->Take() == text) << i << ": " << ends.server->tls.failure();
    ASSERT_EQ(ends.server->Put(text), 1000);
    ASSERT_TRUE(ends.client->Take() == text) << i;
  }
  // A record costs 22 bytes; each third one a message beside it.
  EXPECT_GE(ends.client->traffic.bytes_sent.load() - bytes_before, 100u * 1022 + 33 * 27);
}

TEST_P(TlsTest, AnEndIsSeenWhetherSaidOrNot) {
  Ends said = Established(), unsaid = Established();
  EXPECT_FALSE(said.server->tls.AtEnd(said.server->fd.get()));
  said.client->Put("last words");
  said.client->tls.SayGoodbye(said.client->fd.get());
  EXPECT_FALSE(said.server->tls.AtEnd(said.server->fd.get()));  // They are still to be read.
  EXPECT_EQ(said.server->Take(), "last words");
  EXPECT_TRUE(said.server->tls.AtEnd(said.server->fd.get()));
  said.server->Take();
  EXPECT_EQ(said.server->result, 0);
  unsaid.client.reset();
  EXPECT_TRUE(unsaid.server->tls.AtEnd(unsaid.server->fd.get()));
  unsaid.server->Take();
  EXPECT_EQ(unsaid.server->result, 0);
  // Without a signal, which by default would end the process.
  while (unsaid.server->Put("to nobody") > 0) {
  }
  EXPECT_EQ(errno, EPIPE);
}

TEST_P(TlsTest, ChangedBytesAreAnErrorAndNeverData) {
  for (size_t at : {0u, 3u, 5u, 10u, 500u}) {
    Ends ends = Established();
    ends.client->Put(Pattern(1000, 1));
    std::string wire(4096, '\0');
    const ssize_t size = recv(ends.server->fd.get(), wire.data(), wire.size(), MSG_DONTWAIT);
    ASSERT_GT(size, 1000);
    wire.resize(size);
    EXPECT_FALSE(absl::StrContains(wire, Pattern(1000, 1).substr(0, 16)));
    wire[at] ^= 1;
    ASSERT_EQ(send(ends.client->fd.get(), wire.data(), wire.size(), MSG_NOSIGNAL), size);
    EXPECT_EQ(ends.server->Take(), "");
    if (ends.server->error == EAGAIN) {  // A longer record was announced: its rest never fits.
      const std::string more(20000, 'x');
      (void)!send(ends.client->fd.get(), more.data(), more.size(), MSG_NOSIGNAL);
      EXPECT_EQ(ends.server->Take(), "");
    }
    EXPECT_EQ(ends.server->error, EPROTO) << at;
    EXPECT_TRUE(absl::IsUnavailable(ends.server->tls.failure())) << ends.server->tls.failure();
    ends.server->Take();
    EXPECT_EQ(ends.server->error, EPROTO) << "the failure stays";
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, TlsTest, ::testing::Values(Way::kTcpPsk, Way::kTcpCert),
                         [](const auto& info) { return WayName(info.param); });

TEST(TlsRefusals, AWrongJobKeyIsToldToBoth) {
  Ends ends(ContextOf(PskOptions()), ContextOf(PskOptions(), "another key of sixteen bytes"));
  ends.Greet();
  EXPECT_TRUE(absl::IsUnauthenticated(ends.client_status)) << ends.client_status;
  EXPECT_THAT(Message(ends.client_status), HasSubstr("does not have our job key"));
  EXPECT_TRUE(absl::IsUnauthenticated(ends.server_status)) << ends.server_status;
  EXPECT_THAT(Message(ends.server_status), HasSubstr("does not have the job key"));
}

TEST(TlsRefusals, AnotherModeIsToldToBoth) {
  for (bool client_has_psk : {true, false}) {
    Ends ends(ContextOf(client_has_psk ? PskOptions() : SharedIdentity()),
              ContextOf(client_has_psk ? SharedIdentity() : PskOptions()));
    ends.Greet();
    const std::string of_client = client_has_psk ? "--tls=psk" : "--tls=cert";
    const std::string of_server = client_has_psk ? "--tls=cert" : "--tls=psk";
    EXPECT_TRUE(absl::IsFailedPrecondition(ends.client_status)) << ends.client_status;
    EXPECT_THAT(Message(ends.client_status), AllOf(HasSubstr(of_client), HasSubstr("should have the same")));
    EXPECT_TRUE(absl::IsFailedPrecondition(ends.server_status)) << ends.server_status;
    EXPECT_THAT(Message(ends.server_status),
                AllOf(HasSubstr(absl::StrCat("the peer has ", of_client)), HasSubstr(of_server)));
  }
}

TEST(TlsRefusals, ACertificateOfAnotherCaIsToldToBoth) {
  Folder folder;
  const Issued ours = NewAuthority(), theirs = NewAuthority("their CA");
  const base::TlsOptions right = CertOptions(folder, "right", Issue({}, &ours), ours);
  base::TlsOptions wrong = CertOptions(folder, "wrong", Issue({}, &theirs), theirs);
  // Who believes both and is believed by neither.
  wrong.ca_file = folder.Write("both.ca", theirs.certificate_pem() + ours.certificate_pem());
  for (bool client_is_wrong : {true, false}) {
    Ends ends(ContextOf(client_is_wrong ? wrong : right), ContextOf(client_is_wrong ? right : wrong));
    ends.Greet();
    const absl::Status& refuser = client_is_wrong ? ends.server_status : ends.client_status;
    const absl::Status& refused = client_is_wrong ? ends.client_status : ends.server_status;
    EXPECT_TRUE(absl::IsUnauthenticated(refuser)) << refuser;
    EXPECT_THAT(Message(refuser), AllOf(HasSubstr("peer's certificate is not valid for our CA"),
                                        HasSubstr("right.ca"), HasSubstr("unable to get local issuer")));
    EXPECT_TRUE(absl::IsUnauthenticated(refused)) << refused;
    EXPECT_THAT(Message(refused),
                AllOf(HasSubstr("refuses our certificate"), HasSubstr("wrong.pem"), HasSubstr("unknown CA")));
  }
}

/// A client of TLS 1.3 that is not ours, on a blocking socket. True if the server answered to what it then sent.
bool Foreign(const std::string& address, const std::function<void(SSL_CTX*, SSL*)>& prepare) {
  RawSocket socket(address);
  EXPECT_TRUE(socket.connected());
  SSL_CTX* const context = SSL_CTX_new(TLS_client_method());
  SSL* const ssl = SSL_new(context);
  const unsigned char protocol[] =
      "\x0a"
      "atoll-cert";
  SSL_set_alpn_protos(ssl, protocol, sizeof(protocol) - 1);
  prepare(context, ssl);
  // OpenSSL's own socket calls would raise SIGPIPE: the bytes go through memory.
  BIO* const in = BIO_new(BIO_s_mem());
  BIO* const out = BIO_new(BIO_s_mem());
  BIO_set_mem_eof_return(in, -1);
  SSL_set_bio(ssl, in, out);
  bool answered = false;
  while (true) {
    const int done = SSL_connect(ssl) == 1 ? SSL_read(ssl, &answered, 1) : -1;
    answered = done > 0;
    char* data;
    const long size = BIO_get_mem_data(out, &data);
    if (size > 0) socket.Send(absl::string_view(data, size));
    (void)BIO_reset(out);
    if (answered || SSL_get_error(ssl, done) != SSL_ERROR_WANT_READ) break;
    char bytes[4096];
    const ssize_t got = recv(socket.fd(), bytes, sizeof(bytes), 0);
    if (got <= 0) break;
    BIO_write(in, bytes, static_cast<int>(got));
  }
  SSL_free(ssl);
  SSL_CTX_free(context);
  return answered;
}

void Use(SSL* ssl, const Issued& issued) {
  SSL_use_certificate(ssl, issued.certificate.get());
  SSL_use_PrivateKey(ssl, issued.key.get());
}

TEST(TlsRefusals, ForeignClientsDoNotGetIn) {
  Folder folder;
  const Issued authority = NewAuthority();
  EndpointOptions options = Options("server");
  options.tls = CertOptions(folder, "server", Issue({}, &authority), authority);
  Member server(options);
  const std::string address = server.endpoint().addresses()[0];
  uint64_t refused = 0;
  auto is_refused = [&](const std::function<void(SSL_CTX*, SSL*)>& prepare) {
    EXPECT_FALSE(Foreign(address, prepare));
    ++refused;
    EXPECT_TRUE(Poll([&] { return server.endpoint().counters().refused == refused; }));
  };
  const Issued expired = Issue({.from_days = -3, .to_days = -1}, &authority);
  const Issued server_only = Issue({.extended_usage = "serverAuth"}, &authority);
  const Issued self_signed = Issue({}, nullptr);
  is_refused([](SSL_CTX*, SSL*) {});
  is_refused([&](SSL_CTX*, SSL* ssl) { Use(ssl, expired); });
  is_refused([&](SSL_CTX*, SSL* ssl) { Use(ssl, server_only); });
  is_refused([&](SSL_CTX*, SSL* ssl) { Use(ssl, self_signed); });
  is_refused([](SSL_CTX*, SSL* ssl) { SSL_set_alpn_protos(ssl, nullptr, 0); });
  is_refused([](SSL_CTX*, SSL* ssl) { SSL_set_max_proto_version(ssl, TLS1_2_VERSION); });
  EXPECT_EQ(server.endpoint().counters().authenticated, 0u);
}

base::TlsOptions TlsOf(base::TlsMode mode) {
  if (mode == base::TlsMode::kCert) return SharedIdentity();
  base::TlsOptions options;
  options.mode = mode;
  return options;
}

/// All pairs of modes, over TCP.
TEST(TlsRefusals, EndpointsOfDifferentModesSayWhatIsWrong) {
  constexpr base::TlsMode kModes[] = {base::TlsMode::kNone, base::TlsMode::kPsk, base::TlsMode::kCert};
  for (base::TlsMode of_server : kModes) {
    EndpointOptions options = Options("server");
    options.tls = TlsOf(of_server);
    Member server(options);
    uint64_t refused = 0;
    for (base::TlsMode of_client : kModes) {
      if (of_client == of_server) continue;
      EndpointOptions own = Options("client");
      own.tls = TlsOf(of_client);
      Member client(own);
      auto pipe = client.Connect(server);
      EXPECT_TRUE(absl::IsFailedPrecondition(pipe.status())) << pipe.status();
      EXPECT_THAT(Message(pipe.status()),
                  AllOf(HasSubstr(absl::StrCat("--tls=", base::TlsModeName(of_client))), HasSubstr("same")));
      if (of_server == base::TlsMode::kNone || of_client == base::TlsMode::kNone) {
        EXPECT_THAT(Message(pipe.status()),
                    HasSubstr(absl::StrCat("this endpoint has --tls=", base::TlsModeName(of_server))));
      }
      ++refused;
      EXPECT_TRUE(Poll([&] { return server.endpoint().counters().refused == refused; }));
    }
  }
}

TEST(TlsOnUnixSockets, StaysOutButBothHaveTheSameMode) {
  auto options = [](const std::string& name, base::TlsMode mode) {
    EndpointOptions made = Options(name, Way::kUnix);
    made.tls.mode = mode;
    return made;
  };
  Member server(options("server", base::TlsMode::kPsk)), client(options("client", base::TlsMode::kPsk));
  Member plain(options("plain", base::TlsMode::kNone));
  const std::vector<std::string> address{server.endpoint().addresses()[0]};
  ASSERT_TRUE(absl::StartsWith(address[0], "unix:"));
  EXPECT_TRUE(client.Connect(address).ok());
  auto refused = plain.Connect(address);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(Message(refused.status()), HasSubstr("tls psk"));
}

/// Passes bytes between a client and an endpoint, and sees them.
class Relay {
 public:
  /// `tamper` may change what the client says, or the server.
  explicit Relay(std::string server, std::function<void(std::string&)> tamper = nullptr)
      : server_(std::move(server)), tamper_(std::move(tamper)), listener_(Way::kTcp4) {
    thread_ = std::thread([this] {
      while (true) {
        Fd near = listener_.Accept();
        if (stop_ || !near.valid()) return;
        auto far = std::make_shared<RawSocket>(server_);
        auto own = std::make_shared<RawSocket>(std::move(near));
        passers_.emplace_back([this, own, far] { Pass(*own, *far); });
        passers_.emplace_back([this, own, far] { Pass(*far, *own); });
      }
    });
  }
  ~Relay() {
    stop_ = true;
    RawSocket(listener_.address()).Close();
    thread_.join();
    for (std::thread& passer : passers_) passer.join();
  }
  std::string address() const { return listener_.address(); }
  bool Saw(absl::string_view text) {
    absl::MutexLock lock(&mu_);
    return absl::StrContains(seen_, text);
  }

 private:
  void Pass(RawSocket& from, RawSocket& to) {
    std::string bytes(64 << 10, '\0');
    while (true) {
      const ssize_t got = recv(from.fd(), bytes.data(), bytes.size(), 0);
      if (got <= 0) break;
      std::string passed = bytes.substr(0, got);
      {
        absl::MutexLock lock(&mu_);
        seen_ += passed;
        if (tamper_) tamper_(passed);
      }
      if (!to.Send(passed)) break;
    }
    shutdown(to.fd(), SHUT_RDWR);
    shutdown(from.fd(), SHUT_RDWR);
  }

  const std::string server_;
  const std::function<void(std::string&)> tamper_;
  RawListener listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
  std::vector<std::thread> passers_;
  absl::Mutex mu_;
  std::string seen_ ABSL_GUARDED_BY(mu_);
};

class TlsPipe : public ::testing::TestWithParam<Way>, protected PipePair {
 protected:
  void SetUp() override {
    server_ = Make("server");
    client_ = Make("client");
  }
  std::unique_ptr<Member> Make(const std::string& name) {
    EndpointOptions options = Options(name, GetParam());
    options.enable_cma = false;  // All that is sent takes the way through the sockets.
    return std::make_unique<Member>(options);
  }
  void ConnectThrough(Relay& relay) {
    auto pipe = client_->Connect({relay.address()}, server_->id());
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    near_ = *pipe;
    far_ = server_->Accepted();
    ASSERT_NE(far_, nullptr);
  }
};

TEST_P(TlsPipe, SomeoneOnThePathSeesNothing) {
  Relay relay(server_->endpoint().addresses()[0]);
  ConnectThrough(relay);
  std::vector<std::string> tensors{"a tensor that is a secret" + Pattern(100000, 1)};
  auto written = StartWrite(*near_, MessageOf("a header that is a secret", tensors));
  auto received = Receive(*far_);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_TRUE(received->tensors == tensors);
  const bool bare = GetParam() == Way::kTcp4;
  EXPECT_EQ(relay.Saw("a header that is a secret"), bare);
  EXPECT_EQ(relay.Saw("a tensor that is a secret"), bare);
  EXPECT_EQ(relay.Saw("client"), bare);  // Nor who talks to whom.
  EXPECT_FALSE(relay.Saw(kKey));
  near_.reset();
  client_.reset();
}

TEST_P(TlsPipe, LargeTensorsBothWaysAmidManySmallMessages) {
  Connect();
  constexpr int kLarge = 6, kSmall = 2000;
  auto small = client_->Connect(*server_);
  ASSERT_TRUE(small.ok()) << small.status();
  auto small_far = server_->Accepted();
  ASSERT_NE(small_far, nullptr);
  auto send = [](Pipe& pipe, uint64_t seed) {
    for (int i = 0; i < kLarge; ++i) {
      std::vector<std::string> tensors{Pattern(8 << 20, seed + i)};
      ASSERT_TRUE(Write(pipe, MessageOf(absl::StrCat(i), tensors)).ok());
    }
  };
  auto receive = [](Pipe& pipe, uint64_t seed) {
    for (int i = 0; i < kLarge; ++i) {
      auto received = Receive(pipe);
      ASSERT_TRUE(received.ok()) << received.status();
      ASSERT_TRUE(received->tensors[0] == Pattern(8 << 20, seed + i));
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back([&] { send(*near_, 100); });
  threads.emplace_back([&] { receive(*far_, 100); });
  threads.emplace_back([&] { send(*far_, 200); });
  threads.emplace_back([&] { receive(*near_, 200); });
  threads.emplace_back([&] {
    std::vector<base::Future<base::Unit>> written;
    for (int i = 0; i < kSmall; ++i)
      written.push_back(StartWrite(**small, {Pattern(static_cast<size_t>(i) % 300, i), {}, {}}));
    for (auto& one : written) ASSERT_TRUE(one.Wait(kLimit).ok());
  });
  threads.emplace_back([&] {
    for (int i = 0; i < kSmall; ++i) {
      auto received = ReadDescriptor(*small_far);
      ASSERT_TRUE(received.ok()) << received.status();
      ASSERT_TRUE(received->header == Pattern(static_cast<size_t>(i) % 300, i)) << i;
    }
  });
  for (std::thread& thread : threads) thread.join();
}

TEST_P(TlsPipe, AnEndMidTransferIsAnErrorOnBothSides) {
  for (bool sender_ends : {true, false}) {
    Connect();
    std::vector<std::string> tensors{Pattern(64 << 20, 1)};
    auto written = StartWrite(*near_, MessageOf("large", tensors));
    auto descriptor = ReadDescriptor(*far_);
    ASSERT_TRUE(descriptor.ok()) << descriptor.status();
    (sender_ends ? near_ : far_)->Close(absl::CancelledError("changed my mind"));
    std::string into(64 << 20, '\0');
    EXPECT_FALSE(Read(*far_, {{into.data(), into.size(), {}, nullptr}}).ok());
    EXPECT_FALSE(written.Wait(kLimit).ok());
    EXPECT_FALSE(ReadDescriptor(sender_ends ? *far_ : *near_).ok());
    near_.reset();
    far_.reset();
  }
}

TEST_P(TlsPipe, WhatIsWrittenBeforeTheEndArrives) {
  for (int i = 0; i < 20; ++i) {
    Connect();
    ASSERT_TRUE(Write(*near_, {"first", {}, {}}).ok());
    ASSERT_TRUE(ReadDescriptor(*far_).ok());
    ASSERT_TRUE(Write(*near_, {"last words", {}, {}}).ok());
    near_.reset();
    auto received = ReadDescriptor(*far_);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(received->header, "last words");
    EXPECT_FALSE(ReadDescriptor(*far_).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, TlsPipe, ::testing::Values(Way::kTcp4, Way::kTcpPsk, Way::kTcpCert),
                         [](const auto& info) { return WayName(info.param); });

TEST(TlsOnThePath, ChangedBytesEndThePipe) {
  Member server(Options("server", Way::kTcpPsk)), client(Options("client", Way::kTcpPsk));
  std::atomic<bool> armed{false};
  Relay relay(server.endpoint().addresses()[0], [&](std::string& bytes) {
    if (armed.exchange(false)) bytes[bytes.size() / 2] ^= 1;
  });
  auto pipe = client.Connect({relay.address()});
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  auto far = server.Accepted();
  ASSERT_TRUE(Write(**pipe, {"as it was", {}, {}}).ok());
  ASSERT_TRUE(ReadDescriptor(*far).ok());
  armed = true;
  (void)Write(**pipe, {Pattern(1000, 1), {}, {}});
  EXPECT_FALSE(ReadDescriptor(*far).ok());
  EXPECT_FALSE(ReadDescriptor(**pipe).ok());
}

/// A member of the job's CA who lacks the job key, and who ends TLS on both sides: each side speaks to him, not to
/// the other, and the job key's handshake shows it, though he passes on all of it.
TEST(TlsOnThePath, NobodyCanSpliceTwoConnections) {
  Member server(Options("server", Way::kTcpCert)), client(Options("client", Way::kTcpCert));
  RawListener listener(Way::kTcp4);
  auto context = ContextOf(SharedIdentity());
  std::atomic<uint64_t> passed{0};
  std::thread splicer([&] {
    Fd near = listener.Accept();
    fcntl(near.get(), F_SETFL, fcntl(near.get(), F_GETFL) | O_NONBLOCK);
    auto address = ParseAddress(server.endpoint().addresses()[0]);
    Fd far(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(far.get(), address->raw(), address->size), 0);
    fcntl(far.get(), F_SETFL, fcntl(far.get(), F_GETFL) | O_NONBLOCK);
    End to_client(context, Tls::Side::kServer, std::move(near)),
        to_server(context, Tls::Side::kClient, std::move(far));
    End* const ends[] = {&to_client, &to_server};
    while (true) {
      for (End* end : ends) {
        if (!end->tls.established() && !end->tls.Handshake(end->fd.get()).ok()) return;
      }
      for (int i : {0, 1}) {
        if (!to_client.tls.established() || !to_server.tls.established()) break;
        const std::string bytes = ends[i]->Take();
        if (ends[i]->result == 0 || (ends[i]->result < 0 && ends[i]->error != EAGAIN)) return;
        if (!bytes.empty() && ends[1 - i]->Put(bytes) != static_cast<ssize_t>(bytes.size())) return;
        passed += bytes.size();
      }
      pollfd wait[] = {{to_client.fd.get(), POLLIN, 0}, {to_server.fd.get(), POLLIN, 0}};
      poll(wait, 2, 10);
    }
  });
  auto pipe = client.Connect({listener.address()});
  EXPECT_TRUE(absl::IsUnauthenticated(pipe.status())) << pipe.status();
  splicer.join();
  EXPECT_GT(passed, 200u);  // The hello and the challenge.
  EXPECT_EQ(server.endpoint().counters().authenticated, 0u);
}

}  // namespace
}  // namespace Atoll::transport::testing
