// Where an endpoint listens, and how a peer with many addresses is reached: docs/scenarios/users.md, 34 to 37.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/endpoint.h"
#include "atoll/transport/refusal.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport::testing {
namespace {

using ::testing::HasSubstr;

/// Listens at so many ports in a row, of which the first few are let go again.
class Block {
 public:
  explicit Block(int count) {
    for (int tries = 0; tries < 1000; ++tries) {
      held_.clear();
      SocketAddress first;
      absl::StatusOr<Fd> fd = ListenTcp(*ResolveBind("127.0.0.1"), {}, &first);
      if (!fd.ok() || first.port() + count > 65536) continue;
      held_.push_back(*std::move(fd));
      first_ = first.port();
      for (int i = 1; i < count; ++i) {
        SocketAddress next;
        fd = ListenTcp(*ResolveBind("127.0.0.1"), {first_ + i}, &next);
        if (!fd.ok()) break;
        held_.push_back(*std::move(fd));
      }
      if (held_.size() == static_cast<size_t>(count)) return;
    }
    ADD_FAILURE() << "there are no " << count << " free ports in a row";
  }
  int first() const { return first_; }
  void LetGo(int port) { held_.at(static_cast<size_t>(port - first_)).reset(); }

 private:
  int first_ = 0;
  std::vector<Fd> held_;
};

EndpointOptions OptionsOf(const std::string& name, int port, int count, int last = 0) {
  EndpointOptions options = Options(name);
  options.port = port;
  options.port_count = count;
  options.last_port = last;
  return options;
}

// Scenario users 37.
TEST(Reach, TheFirstFreePortOfARangeIsTaken) {
  Block block(4);
  block.LetGo(block.first() + 1);
  block.LetGo(block.first() + 3);
  Member first(OptionsOf("first", block.first(), 4));
  EXPECT_EQ(first.endpoint().port(), block.first() + 1);
  Member second(OptionsOf("second", block.first(), 4));
  EXPECT_EQ(second.endpoint().port(), block.first() + 3);
  auto pipe = first.Connect(second);
  EXPECT_TRUE(pipe.ok()) << pipe.status();
}

// Scenario users 37.
TEST(Reach, WithNoPortFreeTheErrorSaysWhatWasTried) {
  Block block(3);
  const absl::Status status = CreateEndpoint(OptionsOf("late", block.first(), 3)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(status.message(), absl::StrCat("cannot listen on 127.0.0.1, ports ", block.first(), " to ",
                                           block.first() + 2, ": in use"));
  const absl::Status one = CreateEndpoint(OptionsOf("late", block.first(), 1)).status();
  EXPECT_EQ(one.message(), absl::StrCat("cannot listen on 127.0.0.1, port ", block.first(), ": in use"));
}

TEST(Reach, APortThatIsAnothersIsTakenLast) {
  Block block(3);
  for (int i = 0; i < 3; ++i) block.LetGo(block.first() + i);
  std::vector<int> ports;
  std::vector<std::unique_ptr<Member>> members;
  for (int i = 0; i < 3; ++i) {
    members.push_back(
        std::make_unique<Member>(OptionsOf(absl::StrCat("m", i), block.first(), 3, block.first())));
    ports.push_back(members.back()->endpoint().port());
  }
  EXPECT_THAT(ports, ::testing::ElementsAre(block.first() + 1, block.first() + 2, block.first()));
  // One outside the range is nothing to it.
  const absl::Status status = CreateEndpoint(OptionsOf("late", block.first(), 3, 1)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
}

TEST(Reach, RangesThatCannotBeAreRefused) {
  for (auto [port, count] :
       {std::pair(65535, 2), std::pair(1000, 0), std::pair(-1, 1), std::pair(65536, 1)}) {
    const absl::Status status = CreateEndpoint(OptionsOf("x", port, count)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << port << ", " << count << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("port ", port)));
  }
}

// Scenario users 34.
TEST(Reach, AnAddressToBindHasNoPort) {
  for (const char* bind : {"127.0.0.1:7000", "localhost:7000", "[::1]:7000"}) {
    EndpointOptions options = Options("x");
    options.bind = bind;
    const absl::Status status = CreateEndpoint(options).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << bind << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("it should be without a port"));
  }
}

// Scenario users 36.
TEST(Reach, SilentAddressesLeaveTimeForTheRest) {
  Member server(Options("server")), client(Options("client"));
  RawListener swallows(Way::kTcp4), too(Way::kTcp4);  // Take the connection, and never say a word.
  auto pipe =
      client.Connect({swallows.address(), "127.0.0.1:1", too.address(), server.endpoint().addresses()[0]},
                     server.id(), Lane::kControl, absl::Seconds(4));
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  pipe = client.Connect({swallows.address(), "127.0.0.1:1"}, server.id(), Lane::kControl, absl::Seconds(1));
  EXPECT_FALSE(pipe.ok());
  for (const std::string& address : {swallows.address(), std::string("127.0.0.1:1")}) {
    EXPECT_THAT(std::string(pipe.status().message()), HasSubstr(address)) << "says what was tried";
  }
}

// A name server that is away for a moment buries nobody.
TEST(Reach, BesideAnUnknownHostNobodyIsTakenForDead) {
  Member client(Options("client", Way::kUnix));
  for (const char* unknown : {"no-such-host.invalid:1", "[fe80::1%no-such-interface]:1"}) {
    const absl::Status status =
        client.Connect({"unix:@atoll-nobody-at-all", unknown, "127.0.0.1:1"}).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_FALSE(IsRefused(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no-such-"));
  }
  EXPECT_TRUE(IsRefused(client.Connect({"unix:@atoll-nobody-at-all", "127.0.0.1:1"}).status()));
}

TEST(Reach, ScopesOfAddressesAreKept) {
  for (const char* text : {"[fe80::1%lo]:4711", "[fe80::abcd%1]:4711"}) {
    const absl::StatusOr<SocketAddress> address = ParseAddress(text);
    ASSERT_TRUE(address.ok()) << address.status();
    EXPECT_EQ(address->ToString(), absl::StrCat("[fe80::", text[8] == 'b' ? "abcd" : "1", "%lo]:4711"));
    EXPECT_EQ(reinterpret_cast<const sockaddr_in6*>(&address->storage)->sin6_scope_id, 1u);
  }
  EXPECT_FALSE(ParseAddress("[fe80::1%no-such-interface]:4711").ok());
}

// Scenario users 145.
TEST(Reach, AStrangersAddressIsLogged) {
  Member server(Options("server"));
  EndpointOptions options = Options("stranger");
  options.key.bytes = "another key of sixteen bytes or more";
  Member stranger(options);
  ::testing::internal::CaptureStderr();
  auto pipe = stranger.Connect({server.endpoint().addresses()[0]});
  EXPECT_TRUE(absl::IsUnauthenticated(pipe.status())) << pipe.status();
  EXPECT_TRUE(Poll([&] { return server.endpoint().counters().refused == 1; }));
  server.endpoint().Close();
  server.endpoint().Join();
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("refused a connection from 127.0.0.1:"));
  EXPECT_THAT(log, HasSubstr("it has another one, or gave up"));
  EXPECT_THAT(log, ::testing::Not(HasSubstr(kKey)));
}

}  // namespace
}  // namespace Atoll::transport::testing
