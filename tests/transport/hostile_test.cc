// Whatever arrives at the door, honest traffic goes on and new peers join.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "atoll/tests/transport/raw_peer.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::transport::testing {
namespace {

/// Calls that run in the background from the start to the end of a test; none may fail.
class HonestTraffic {
 public:
  HonestTraffic(Member& client, Member& server) {
    auto pipe = client.Connect(server);
    EXPECT_TRUE(pipe.ok()) << pipe.status();
    near_ = *pipe;
    far_ = server.Accepted();
    echo_ = std::thread([this] {
      while (true) {
        auto received = Receive(*far_);
        if (!received.ok()) return;
        if (!Write(*far_, MessageOf(received->header, received->tensors)).ok()) return;
      }
    });
    caller_ = std::thread([this] {
      for (uint64_t i = 0; !stop_; ++i) {
        std::vector<std::string> tensors{Pattern(i % 7 == 0 ? 300000 : 1000, i)};
        absl::Status status = Write(*near_, MessageOf(absl::StrCat(i), tensors));
        ASSERT_TRUE(status.ok()) << status;
        auto received = Receive(*near_);
        ASSERT_TRUE(received.ok()) << received.status();
        ASSERT_EQ(received->header, absl::StrCat(i));
        ASSERT_TRUE(received->tensors == tensors);
        absl::MutexLock lock(&mu_);
        ++calls_;
      }
    });
    // The first calls also wait for the further connections of the pipe.
    AwaitCalls(3);
  }
  ~HonestTraffic() {
    // Calls go on after the attack too.
    AwaitCalls(5);
    stop_ = true;
    caller_.join();
    near_.reset();
    echo_.join();
  }

 private:
  void AwaitCalls(uint64_t count) {
    absl::MutexLock lock(&mu_);
    const uint64_t wanted = calls_ + count;
    auto made = [this, wanted]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return calls_ >= wanted; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&made), kLimit));
  }

  std::shared_ptr<Pipe> near_, far_;
  std::atomic<bool> stop_{false};
  absl::Mutex mu_;
  uint64_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread echo_, caller_;
};

class HostileTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    EndpointOptions options = Options("server", GetParam());
    options.max_unauthenticated = 64;
    options.max_header_bytes = 1 << 20;
    options.handshake_limit = kHandshakeLimit;
    if (ClockIsOurs()) options.clock = &clock_;
    server_ = std::make_unique<Member>(options);
    client_ = std::make_unique<Member>(Options("client", GetParam()));
    address_ = server_->endpoint().addresses()[0];
    honest_ = std::make_unique<HonestTraffic>(*client_, *server_);
  }
  void TearDown() override {
    Member newcomer(Options("newcomer", GetParam()));
    auto pipe = newcomer.Connect(*server_);
    EXPECT_TRUE(pipe.ok()) << pipe.status();
    auto far = server_->Accepted();
    ASSERT_NE(far, nullptr);
    EXPECT_TRUE(Write(**pipe, {"hello", {}, {}}).ok());
    EXPECT_TRUE(ReadDescriptor(*far).ok());
    EXPECT_EQ(far->peer().member, newcomer.id());
    honest_.reset();
  }
  virtual bool ClockIsOurs() const { return false; }
  uint64_t authenticated() { return server_->endpoint().counters().authenticated; }
  /// Returns when the server has handled all that was sent to it before.
  void Fence() {
    RawSocket socket(address_);
    socket.Send("x");
    EXPECT_TRUE(socket.SeesTheEnd());
  }

  static constexpr absl::Duration kHandshakeLimit = absl::Seconds(30);
  base::FakeClock clock_;
  std::unique_ptr<Member> server_, client_;
  std::unique_ptr<HonestTraffic> honest_;
  std::string address_;
};

TEST_P(HostileTest, ConnectAndClose) {
  for (int i = 0; i < 300; ++i) RawSocket(address_).Close();
}

TEST_P(HostileTest, HttpAndJunk) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 100; ++i) {
    RawSocket http(address_);
    http.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_TRUE(http.SeesTheEnd());
    RawSocket junk(address_);
    std::string bytes(1 + random() % 5000, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    junk.Send(bytes);
    EXPECT_TRUE(junk.SeesTheEnd());
  }
}

TEST_P(HostileTest, HugeLengthsBeforeAuthentication) {
  for (uint32_t length : {4097u, 0x7fffffffu, 0xffffffffu}) {
    RawSocket socket(address_);
    std::string head("AtollTP\n\x01\x00\x00\x00", 12);
    head.append(reinterpret_cast<const char*>(&length), 4);
    socket.Send(head);
    EXPECT_TRUE(socket.SeesTheEnd());
  }
}

// Scenario users 147.
TEST_P(HostileTest, AThousandIdleConnections) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<std::unique_ptr<RawSocket>> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(std::make_unique<RawSocket>(address_));
    ASSERT_TRUE(idle.back()->connected()) << i;
  }
  // The oldest were dropped for the newest.
  for (int i = 0; i < 900; ++i) ASSERT_TRUE(idle[i]->SeesTheEnd()) << i;
  Member newcomer(Options("amid", GetParam()));
  auto pipe = newcomer.Connect(*server_);
  EXPECT_TRUE(pipe.ok()) << pipe.status();
  ASSERT_NE(server_->Accepted(), nullptr);
}

TEST_P(HostileTest, WrongKeysAtOnce) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      EndpointOptions options = Options(absl::StrCat("stranger", t), GetParam());
      options.key.bytes = absl::StrCat("not the key, number ", t);
      Member stranger(options);
      for (int i = 0; i < 20; ++i) {
        auto pipe = stranger.Connect({address_});
        EXPECT_TRUE(absl::IsUnauthenticated(pipe.status())) << pipe.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(HostileTest, ReplayAndReflection) {
  const HandshakeConfig config = RawConfig(server_->options(), "recorded");
  ClientHandshake handshake(&config, {}, {0, 0}, NewNonce());
  RawSocket first(address_);
  const std::string hello = handshake.TakeOutput();
  first.Send(hello);
  std::string challenge;
  while (!handshake.finished()) {
    const std::string bytes = first.Receive(handshake.wanted());
    challenge += bytes;
    handshake.Feed(bytes);
    ASSERT_TRUE(handshake.status().ok()) << handshake.status();
  }
  const std::string proof = handshake.TakeOutput();
  // The same bytes on another connection, before and after the first has used them.
  RawSocket early(address_);
  early.Send(hello + proof);
  EXPECT_TRUE(early.SeesTheEnd());
  const uint64_t before = authenticated();
  first.Send(proof);
  Fence();
  ASSERT_EQ(authenticated(), before + 1);
  RawSocket late(address_);
  late.Send(hello + proof);
  EXPECT_TRUE(late.SeesTheEnd());
  // The server's own bytes back at it: whole, and its HMAC as the proof.
  RawSocket mirror(address_);
  mirror.Send(hello);
  const std::string own = mirror.Receive(challenge.size());
  mirror.Send(own.substr(own.size() - kProofBytes));
  EXPECT_TRUE(mirror.SeesTheEnd());
  RawSocket echo(address_);
  echo.Send(challenge);
  EXPECT_TRUE(echo.SeesTheEnd());
  EXPECT_EQ(authenticated(), before + 1);
}

/// An authenticated peer's first frames.
TEST_P(HostileTest, JunkFromAnAuthenticatedPeerBeforeItsPipe) {
  const std::string packet = NewPipePacket();
  std::mt19937_64 random(2);
  std::string noise(2000, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  const uint64_t huge = uint64_t{1} << 40;
  const std::string huge_head(reinterpret_cast<const char*>(&huge), 8);
  struct Attack {
    Purpose purpose;
    std::string bytes;
  };
  const std::vector<Attack> attacks{
      {{0, 0}, huge_head},
      {{0, 0}, RawSocket::Frame("")},
      {{0, 0}, RawSocket::Frame(noise)},
      {{0, 0}, noise},
      {{0, 0}, RawSocket::Frame(std::string(16 << 10, 'x'))},
      {{0, 0}, RawSocket::Frame(packet) + huge_head},
      {{0, 0}, RawSocket::Frame(packet) + RawSocket::Frame(noise)},
      {{0, 0}, RawSocket::Frame(packet) + RawSocket::Frame(packet)},
      {{0, 0}, RawSocket::Frame(packet) + RawSocket::Frame(BrochureFrame("elsewhere"))},
      {{0, 0}, RawSocket::Frame(JoinPacket(7))},                            // Not what the purpose says.
      {{0, Purpose::kNoLane}, RawSocket::Frame(packet)},                    // Nor here.
      {{0, Purpose::kNoLane}, RawSocket::Frame(JoinPacket(~uint64_t{0}))},  // Nobody waits for that.
      {{1, Purpose::kNoLane}, RawSocket::Frame(JoinPacket(0))},
      {{1, Purpose::kNoLane}, RawSocket::Frame(LanePacket(12345))},
      {{2, Purpose::kNoLane}, RawSocket::Frame(noise)},
      {{200, Purpose::kNoLane}, RawSocket::Frame(packet)},
  };
  for (size_t i = 0; i < attacks.size(); ++i) {
    RawSocket socket(address_);
    const HandshakeConfig config = RawConfig(server_->options(), "junk");
    ClientHandshake handshake(&config, {}, attacks[i].purpose, NewNonce());
    ASSERT_TRUE(socket.Greet(handshake)) << handshake.status();
    socket.Send(attacks[i].bytes);
    EXPECT_TRUE(socket.SeesTheEnd()) << i;
  }
  // Cut anywhere.
  const std::string whole = RawSocket::Frame(packet) + RawSocket::Frame(BrochureFrame(kTransportDomain));
  for (size_t size = 0; size <= whole.size(); size += 7) {
    RawSocket socket(address_);
    const HandshakeConfig config = RawConfig(server_->options(), "cut");
    ClientHandshake handshake(&config, {}, {0, 0}, NewNonce());
    ASSERT_TRUE(socket.Greet(handshake)) << handshake.status();
    socket.Send(whole.substr(0, size));
    socket.Close();
  }
}

TEST_P(HostileTest, JunkFromAnAuthenticatedPeerInItsPipe) {
  std::mt19937_64 random(3);
  std::string noise(500, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  const uint64_t huge = uint64_t{1} << 40;
  tensorpipe::Descriptor payloads = DescriptorOf({});
  payloads.payloads.emplace_back();
  payloads.payloads[0].length = 100;
  tensorpipe::Descriptor device = DescriptorOf({8});
  device.tensors[0].targetDevice = tensorpipe::Device("cuda", 99);
  tensorpipe::Descriptor source = DescriptorOf({8});
  source.tensors[0].sourceDevice = tensorpipe::Device("tpu", 0);
  tensorpipe::Descriptor no_target = DescriptorOf({8});
  no_target.tensors[0].targetDevice.reset();
  const std::vector<std::string> attacks{
      std::string(reinterpret_cast<const char*>(&huge), 8),
      RawSocket::Frame(noise),
      noise,
      RawSocket::Frame(Encode(DescriptorOf({huge << 10}))),
      RawSocket::Frame(Encode(DescriptorOf(std::vector<size_t>(5000, 1)))),
      RawSocket::Frame(Encode(payloads)),
      RawSocket::Frame(Encode(device)),
      RawSocket::Frame(Encode(source)),
      RawSocket::Frame(Encode(no_target)),
      RawSocket::Frame(NewPipePacket()),
  };
  for (size_t i = 0; i < attacks.size(); ++i) {
    RawPeer peer(address_, server_->options());
    ASSERT_TRUE(peer.Establish()) << i;
    auto pipe = server_->Accepted();
    ASSERT_NE(pipe, nullptr);
    auto descriptor = StartReadDescriptor(*pipe);
    peer.descriptors().Send(attacks[i]);
    auto read = descriptor.Wait(kLimit);
    EXPECT_TRUE(absl::IsInvalidArgument(read.status())) << i << ": " << read.status();
    EXPECT_TRUE(peer.descriptors().SeesTheEnd()) << i;
  }
  // A good message first, to see that the raw peer is taken for one; then a tensor of another length.
  for (size_t length : {0u, 7u, 9u, 100000u}) {
    RawPeer peer(address_, server_->options());
    ASSERT_TRUE(peer.Establish());
    auto pipe = server_->Accepted();
    ASSERT_NE(pipe, nullptr);
    peer.descriptors().Send(RawSocket::Frame(Encode(DescriptorOf({8}))));
    peer.tensors().Send(RawSocket::Frame("12345678"));
    auto received = Receive(*pipe);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(received->tensors[0], "12345678");
    peer.descriptors().Send(RawSocket::Frame(Encode(DescriptorOf({8}))));
    peer.tensors().Send(RawSocket::Frame(std::string(length, 'x')));
    EXPECT_TRUE(absl::IsInvalidArgument(Receive(*pipe).status()));
  }
}

TEST_P(HostileTest, AServiceThatAnswersJunkHarmsNoClient) {
  std::mt19937_64 random(4);
  std::string noise(500, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  const tensorpipe::Device cpu("cpu", 0);
  tensorpipe::BrochureAnswer answer;
  answer.transport = "uv";
  const std::vector<std::string> answers{RawSocket::Frame(noise),
                                         noise,
                                         RawSocket::Frame(""),
                                         RawSocket::Frame(Encode(answer)),
                                         RawSocket::Frame(BrochureFrame(kTransportDomain)),
                                         ""};
  for (size_t i = 0; i < answers.size(); ++i) {
    RawListener service(GetParam());
    std::thread thread([&] {
      RawSocket socket(service.Accept());
      const HandshakeConfig config = RawConfig(server_->options(), "service");
      ServerHandshake handshake(&config, NewNonce());
      ASSERT_TRUE(socket.Greet(handshake)) << handshake.status();
      socket.ReceiveFrame();
      socket.ReceiveFrame();
      socket.Send(answers[i]);
      if (answers[i].empty()) return;
      EXPECT_TRUE(socket.SeesTheEnd());
    });
    auto pipe = client_->Connect({service.address()});
    EXPECT_FALSE(pipe.ok());
    EXPECT_FALSE(absl::IsDeadlineExceeded(pipe.status())) << pipe.status();
    thread.join();
  }
  // And one that does not even know us.
  RawListener service(GetParam());
  std::thread thread([&] {
    RawSocket socket(service.Accept());
    socket.Send("HTTP/1.1 400 Bad Request\r\n\r\n");
    socket.SeesTheEnd();
  });
  auto pipe = client_->Connect({service.address()});
  EXPECT_TRUE(absl::IsUnavailable(pipe.status())) << pipe.status();
  thread.join();
}

class SlowStrangersTest : public HostileTest {
 protected:
  bool ClockIsOurs() const override { return true; }
};

TEST_P(SlowStrangersTest, AByteAtATimeEndsAtTheLimit) {
  std::vector<std::unique_ptr<RawSocket>> sockets;
  const HandshakeConfig config = RawConfig(server_->options(), "slow");
  for (int i = 0; i < 20; ++i) sockets.push_back(std::make_unique<RawSocket>(address_));
  ClientHandshake handshake(&config, {}, {0, 0}, NewNonce());
  const std::string hello = handshake.TakeOutput();
  const uint64_t refused_before = server_->endpoint().counters().refused;
  // They never pause, which gains them nothing.
  constexpr size_t kBytes = 20;
  for (size_t at = 0; at < kBytes; ++at) {
    for (auto& socket : sockets) socket->Send(hello.substr(at, 1));
    Fence();
    for (auto& socket : sockets) ASSERT_TRUE(socket->Open()) << at;
    clock_.Advance(kHandshakeLimit / (kBytes + 1));
  }
  clock_.Advance(kHandshakeLimit / kBytes);
  for (auto& socket : sockets) socket->Send(hello.substr(kBytes, 1));
  for (auto& socket : sockets) EXPECT_TRUE(socket->SeesTheEnd());
  // Known, but silent after it.
  RawSocket known(address_);
  ClientHandshake second(&config, {}, {0, 0}, NewNonce());
  ASSERT_TRUE(known.Greet(second)) << second.status();
  known.Send(RawSocket::Frame(NewPipePacket()));
  Fence();
  EXPECT_TRUE(known.Open());
  clock_.Advance(kHandshakeLimit + absl::Seconds(1));
  Fence();
  EXPECT_TRUE(known.SeesTheEnd());
  EXPECT_EQ(server_->endpoint().counters().refused, refused_before + sockets.size() + 1 + kBytes + 2);
}

INSTANTIATE_TEST_SUITE_P(Ways, HostileTest, ::testing::Values(Way::kTcp4, Way::kUnix),
                         [](const auto& info) { return WayName(info.param); });
INSTANTIATE_TEST_SUITE_P(Ways, SlowStrangersTest, ::testing::Values(Way::kTcp4, Way::kUnix),
                         [](const auto& info) { return WayName(info.param); });

void TakeAllDescriptors(std::vector<Fd>* all) {
  while (true) {
    Fd fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) return;
    all->push_back(std::move(fd));
  }
}

/// In a process of its own, whose descriptors it may use up. Exits with 0 if all went well.
void UseUpAllDescriptors(Way way) {
  Member server(Options("server", way)), client(Options("client", way));
  const std::string address = server.endpoint().addresses()[0];
  const HandshakeConfig known = RawConfig(server.options(), "known");
  auto honest = std::make_unique<HonestTraffic>(client, server);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, 256);
  setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<Fd> all;
  TakeAllDescriptors(&all);
  const uint64_t refused_before = server.endpoint().counters().refused;
  for (int i = 1; i <= 50; ++i) {
    all.pop_back();  // For our end; the server finds none for its own.
    RawSocket socket(address);
    if (!socket.connected() || !socket.SeesTheEnd()) _exit(2);
    // Counted once the server has its reserve back: what we take next is ours.
    if (!Poll([&] { return server.endpoint().counters().refused >= refused_before + i; })) _exit(9);
    socket.Close();
    all.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  // Not one descriptor for it: an error, no more.
  auto refused = client.Connect(server.endpoint().addresses(), server.id(), Lane::kControl, absl::Seconds(5));
  if (refused.ok()) _exit(3);
  // Strangers who hold the last descriptors do not keep out who has the key: the oldest goes.
  all.erase(all.end() - 10, all.end());
  const uint64_t accepted = server.endpoint().counters().accepted;
  std::vector<std::unique_ptr<RawSocket>> idle;
  for (int i = 0; i < 5; ++i) idle.push_back(std::make_unique<RawSocket>(address));
  if (!Poll([&] { return server.endpoint().counters().accepted >= accepted + 5; })) _exit(10);
  TakeAllDescriptors(&all);
  all.pop_back();
  RawSocket newcomer(address);
  ClientHandshake handshake(&known, {}, {0, 0}, NewNonce());
  if (!newcomer.connected()) _exit(8);
  if (!newcomer.Greet(handshake) || !idle[0]->SeesTheEnd()) _exit(6);
  // Nor do they keep the server from calling others.
  all.pop_back();
  auto other = std::make_unique<RawListener>(way);
  TakeAllDescriptors(&all);
  std::thread call([&server, address = other->address()] { (void)server.Connect({address}, {}); });
  if (!idle[1]->SeesTheEnd()) _exit(7);
  other.reset();
  call.join();
  idle.clear();
  all.clear();
  auto pipe = client.Connect(server);
  if (!pipe.ok()) _exit(4);
  honest.reset();
  if (::testing::Test::HasFailure()) _exit(5);
  _exit(0);
}

TEST(DescriptorsTest, RunningOutOfThemHarmsNobody) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(UseUpAllDescriptors(Way::kTcp4), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(UseUpAllDescriptors(Way::kUnix), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace Atoll::transport::testing
