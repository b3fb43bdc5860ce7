// Joining and being refused: what Connect and CreateEndpoint say, and to whom.
#include "atoll/transport/endpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"

namespace Atoll::transport::testing {
namespace {

class JoinTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (!Possible(GetParam())) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: this machine has no ::1";
    server_ = std::make_unique<Member>(Options("server", GetParam()));
  }
  EndpointOptions Stranger() {
    EndpointOptions options = Options("stranger", GetParam());
    return options;
  }
  /// Only the address of the kind under test.
  std::vector<std::string> Address() { return {server_->endpoint().addresses()[0]}; }

  std::unique_ptr<Member> server_;
};

// Scenario users 145.
TEST_P(JoinTest, WrongKey) {
  EndpointOptions options = Stranger();
  options.key.bytes = "another key of sixteen bytes or more";
  Member stranger(options);
  auto pipe = stranger.Connect(Address());
  EXPECT_TRUE(absl::IsUnauthenticated(pipe.status())) << pipe.status();
  EXPECT_EQ(base::GetRan(pipe.status()), base::Ran::kNo);
  EXPECT_FALSE(absl::StrContains(pipe.status().message(), kKey));
  EXPECT_EQ(server_->endpoint().counters().authenticated, 0u);
}

TEST_P(JoinTest, WrongJob) {
  EndpointOptions options = Stranger();
  options.job = "other";
  Member stranger(options);
  auto pipe = stranger.Connect(Address());
  EXPECT_TRUE(absl::IsFailedPrecondition(pipe.status())) << pipe.status();
  EXPECT_TRUE(absl::StrContains(pipe.status().message(), "job")) << pipe.status();
}

TEST_P(JoinTest, WrongNameOrIncarnation) {
  Member member(Stranger());
  auto pipe = member.Connect(Address(), {"somebody", {}});
  EXPECT_TRUE(absl::IsNotFound(pipe.status())) << pipe.status();
  EXPECT_TRUE(absl::StrContains(pipe.status().message(), "server")) << pipe.status();
  pipe = member.Connect(Address(), {"server", base::Incarnation(1)});
  EXPECT_TRUE(absl::IsNotFound(pipe.status())) << pipe.status();
  EXPECT_TRUE(member.Connect(Address(), {"server", {}}).ok());
  EXPECT_TRUE(member.Connect(Address(), {}).ok());
}

TEST_P(JoinTest, NobodyAnswers) {
  Member member(Stranger());
  const std::vector<std::string> address = Address();
  server_.reset();
  auto pipe = member.Connect(address);
  EXPECT_TRUE(absl::IsUnavailable(pipe.status())) << pipe.status();
  EXPECT_TRUE(absl::StrContains(pipe.status().message(), address[0])) << pipe.status();
  EXPECT_EQ(base::GetRan(pipe.status()), base::Ran::kNo);
}

TEST_P(JoinTest, TheFirstThatAnswersIsTaken) {
  Member gone(Options("gone", GetParam()));
  std::vector<std::string> addresses = gone.endpoint().addresses();
  gone.endpoint().Close();
  gone.endpoint().Join();
  Member other(Options("other", GetParam()));  // Answers, but is not who is wanted.
  addresses.push_back(other.endpoint().addresses()[0]);
  addresses.push_back("nonsense");
  addresses.push_back("unix:@atoll-nobody-listens-here");
  addresses.push_back(Address()[0]);
  Member member(Stranger());
  auto pipe = member.Connect(addresses, server_->id());
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  EXPECT_EQ((*pipe)->peer().member, server_->id());
  EXPECT_EQ((*pipe)->peer().address, Address()[0]);
}

TEST_P(JoinTest, SilenceEndsAtTheLimit) {
  RawListener silent(GetParam());
  Member member(Stranger());
  auto pipe = member.Connect({silent.address()}, {}, Lane::kControl, absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(pipe.status())) << pipe.status();
}

TEST_P(JoinTest, ANameCanBeTakenAgainAtOnce) {
  Member member(Stranger());
  for (int i = 0; i < 5; ++i) {
    EndpointOptions options = server_->options();
    const int port = server_->endpoint().port();
    server_.reset();
    options.self.incarnation = base::NewIncarnation();
    options.port = port;
    server_ = std::make_unique<Member>(options);
    EXPECT_EQ(server_->endpoint().port(), port);
    auto pipe = member.Connect(*server_);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    ASSERT_NE(server_->Accepted(), nullptr);
  }
}

TEST_P(JoinTest, AMemberMayConnectToItself) {
  auto pipe = server_->Connect(*server_);
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  auto far = server_->Accepted();
  ASSERT_NE(far, nullptr);
  EXPECT_TRUE(Write(**pipe, {"hello", {}, {}}).ok());
  EXPECT_TRUE(ReadDescriptor(*far).ok());
}

TEST_P(JoinTest, CloseEndsAConnectThatWaits) {
  RawListener silent(GetParam());
  auto member = std::make_unique<Member>(Stranger());
  base::Promise<std::shared_ptr<Pipe>> promise;
  member->endpoint().Connect(
      {silent.address()}, {}, Lane::kControl, kLimit,
      [promise](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { promise.Set(std::move(pipe)); });
  const Fd held = silent.Accept();  // Open, and silent.
  ASSERT_TRUE(held.valid());
  member.reset();
  ASSERT_TRUE(promise.future().ready());  // Join waits for callbacks.
  EXPECT_TRUE(absl::IsCancelled(promise.future().Wait(kLimit).status()));
}

INSTANTIATE_TEST_SUITE_P(Ways, JoinTest,
                         ::testing::Values(Way::kTcp4, Way::kTcp6, Way::kUnix, Way::kTcpPsk, Way::kTcpCert),
                         [](const auto& info) { return WayName(info.param); });

TEST(Endpoint, HostNamesAreResolved) {
  Member server(Options("server")), client(Options("client"));
  auto pipe = client.Connect({absl::StrCat("localhost:", server.endpoint().port())}, server.id());
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  auto unknown = client.Connect({"no-such-host.invalid:80"});
  EXPECT_TRUE(absl::IsUnavailable(unknown.status())) << unknown.status();
}

TEST(Endpoint, UnixComesFirstAndIsNamedByTheMember) {
  EndpointOptions options = Options("server", Way::kUnix);
  options.self.incarnation = base::Incarnation(0xabc);
  Member server(options);
  ASSERT_EQ(server.endpoint().addresses().size(), 2u);
  EXPECT_EQ(server.endpoint().addresses()[0], "unix:@atoll-test-server-0000000000000abc");
  EXPECT_EQ(server.endpoint().addresses()[1], absl::StrCat("127.0.0.1:", server.endpoint().port()));
  options.self.name = std::string(123, 'n') + "_-.:";  // As long as a name may be: too long for an address.
  Member odd(options);
  Member client(Options("client", Way::kUnix));
  auto pipe = client.Connect(odd);
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  EXPECT_TRUE(absl::StartsWith((*pipe)->peer().address, "unix:@atoll-")) << (*pipe)->peer().address;
}

TEST(Endpoint, AWildcardSaysWhereItIsReached) {
  EndpointOptions options = Options("server");
  options.bind = "0.0.0.0";
  Member server(options);
  Member client(Options("client"));
  ASSERT_FALSE(server.endpoint().addresses().empty());
  for (const std::string& address : server.endpoint().addresses()) {
    auto pipe = client.Connect({address}, server.id());
    EXPECT_TRUE(pipe.ok()) << address << ": " << pipe.status();
  }
}

std::vector<std::string> ReachableOf(const std::string& bound, const std::vector<std::string>& local,
                                     size_t max_count) {
  std::vector<SocketAddress> addresses;
  for (const std::string& text : local) addresses.push_back(*ParseAddress(text));
  std::vector<std::string> result;
  for (const SocketAddress& one : Reachable(*ParseAddress(bound), addresses, max_count))
    result.push_back(one.ToString());
  return result;
}

TEST(Endpoint, AWildcardTellsFewAddressesAndNoLoopbackBesideOthers) {
  using ::testing::ElementsAre;
  EXPECT_THAT(ReachableOf("0.0.0.0:7", {"127.0.0.1:1", "10.0.0.1:1", "[::1]:1", "172.17.0.1:1"}, 16),
              ElementsAre("10.0.0.1:7", "172.17.0.1:7"));
  EXPECT_THAT(ReachableOf("[::]:7", {"127.0.0.1:1", "127.3.2.1:1", "[::1]:1"}, 2),
              ElementsAre("127.0.0.1:7", "127.3.2.1:7"));
  std::vector<std::string> bridges;
  for (int i = 0; i < 40; ++i) bridges.push_back(absl::StrCat("172.18.", i, ".1:1"));
  EXPECT_EQ(ReachableOf("0.0.0.0:7", bridges, kMaxAddresses - 1).size(), kMaxAddresses - 1);
}

TEST(Endpoint, PortsInUse) {
  Member first(Options("first"));
  EndpointOptions options = Options("second");
  options.port = first.endpoint().port();
  auto second = CreateEndpoint(options);
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
  EXPECT_TRUE(absl::StrContains(second.status().message(), absl::StrCat(options.port))) << second.status();
  options.port_count = 20;
  second = CreateEndpoint(options);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_GT((*second)->port(), options.port);
}

TEST(Endpoint, AnInterfaceByName) {
  EndpointOptions options = Options("server");
  options.bind = "lo";
  Member server(options);
  EXPECT_TRUE(absl::StartsWith(server.endpoint().addresses()[0], "127.0.0.1:"));
}

// Scenario init 2.
TEST(Endpoint, WhatCannotBeIsRefusedWithAReason) {
  EndpointOptions options = Options("server");
  options.bind = "no-such-interface0.invalid";
  auto endpoint = CreateEndpoint(options);
  EXPECT_TRUE(absl::IsInvalidArgument(endpoint.status())) << endpoint.status();
  EXPECT_TRUE(absl::StrContains(endpoint.status().message(), "lo 127.0.0.1")) << endpoint.status();
  options.bind = "192.0.2.1";  // Reserved for documentation: nobody's.
  endpoint = CreateEndpoint(options);
  EXPECT_TRUE(absl::IsInvalidArgument(endpoint.status())) << endpoint.status();
  EXPECT_TRUE(absl::StrContains(endpoint.status().message(), "lo 127.0.0.1")) << endpoint.status();
  options = Options("server");
  options.key.bytes = "short";
  EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(options).status()));
  options = Options("");
  EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(options).status()));
  for (const std::string& name : {std::string("two\nlines"), std::string("\x1b[31m"),
                                  std::string("zero\0", 5), std::string(257, 'n')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(Options(name)).status()));
  }
  options = Options("server");
  options.self.incarnation = {};
  EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(options).status()));
  options = Options("server");
  options.job = "";
  EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(options).status()));
  options = Options("server");
  options.handshake_limit = absl::ZeroDuration();
  EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(options).status()));
  for (size_t EndpointOptions::*limit : {&EndpointOptions::max_header_bytes, &EndpointOptions::max_tensors,
                                         &EndpointOptions::max_tensor_bytes}) {
    options = Options("server");
    options.*limit = 0;
    EXPECT_TRUE(absl::IsInvalidArgument(CreateEndpoint(options).status()));
  }
}

TEST(Endpoint, TwoOfOneNameAndIncarnationOnOneHost) {
  EndpointOptions options = Options("server", Way::kUnix);
  Member first(options);
  auto second = CreateEndpoint(options);
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status())) << second.status();
}

TEST(Endpoint, AnotherUsersProcessIsTurnedAwayAtTheUnixSocket) {
  if (geteuid() != 0) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: only root can become another user";
  Member server(Options("server", Way::kUnix));
  auto address = ParseAddress(server.endpoint().addresses()[0]);
  ASSERT_TRUE(address.ok());
  const pid_t child = fork();
  if (child == 0) {  // Only system calls: other threads' locks may be held for ever here.
    if (setresuid(65534, 65534, 65534) != 0) _exit(2);
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, address->raw(), address->size) != 0) _exit(3);
    char byte;
    _exit(read(fd, &byte, 1) == 0 ? 0 : 4);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(server.endpoint().counters().refused, 1u);
}

TEST(Endpoint, NothingIsLeftBehind) {
  auto count = [] {
    int fds = 0;
    for (int fd = 0; fd < 1024; ++fd) fds += fcntl(fd, F_GETFD) != -1;
    return fds;
  };
  { Member warm_up(Options("warm", Way::kUnix)); }
  const int before = count();
  std::vector<bool> already(1024);
  for (int fd = 0; fd < 1024; ++fd) already[fd] = fcntl(fd, F_GETFD) != -1;
  for (int i = 0; i < 5; ++i) {
    Member server(Options("server", Way::kUnix)), client(Options("client", Way::kUnix));
    auto pipe = client.Connect(server);
    ASSERT_TRUE(pipe.ok());
    auto far = server.Accepted();
    for (int fd = 0; fd < 1024; ++fd) {
      const int flags = fcntl(fd, F_GETFD);
      if (flags == -1 || already[fd]) continue;
      EXPECT_NE(flags & FD_CLOEXEC, 0) << fd;
    }
    ASSERT_TRUE(Write(**pipe, {"x", {}, {}}).ok());
    ASSERT_TRUE(ReadDescriptor(*far).ok());
  }
  EXPECT_EQ(count(), before);
}

}  // namespace
}  // namespace Atoll::transport::testing
