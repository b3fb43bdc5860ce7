// How an agent learns that a member has ended, restarted or is out of reach, and what its calls are told.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"
#include "atoll/transport/refusal.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::AllOf;
using ::testing::HasSubstr;

class AgentDeathTest : public AgentTest {};
INSTANTIATE_AGENT_TESTS(AgentDeathTest);

// With a network that can be away.
class UnreachableTest : public AgentTest {};
INSTANTIATE_FAKE_AGENT_TESTS(UnreachableTest);

int CountText(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Two processes that were started with one name: the one that has no place can still ask, and is told so.
TEST_P(AgentDeathTest, WhoOnlyCameUnderANameMayStillAskWhenAnotherGetsIt) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  ServeEcho(a);
  b.AddPeer({a.self(), a.addresses()});
  ASSERT_TRUE(b.Call("a", {"echo"}, Body("1")).Wait(kHang).ok());
  const base::MemberId other{"b", base::NewIncarnation()};
  a.AddPeer({other, {"127.0.0.1:1"}});
  EXPECT_EQ(a.FindPeer("b")->id, other);
  absl::StatusOr<Received> reply = b.Call("a", {"echo"}, Body("2")).Wait(kHang);
  EXPECT_TRUE(reply.ok()) << reply.status();
  // But one that was made known is replaced for good.
  a.AddPeer({b.self(), b.addresses()});
  EXPECT_EQ(a.FindPeer("b")->id, b.self());
  a.AddPeer({{"b", base::NewIncarnation()}, {"127.0.0.1:1"}});
  CallOptions soon;
  soon.timeout = absl::Milliseconds(50);
  EXPECT_FALSE(b.Call("a", {"echo"}, Body("3"), soon).Wait(kHang).ok());
  b.RemovePeer(a.self(), absl::OkStatus());  // Which it would try to reach to its end.
}

// Scenario init 13.
TEST_P(AgentDeathTest, AnEndWithoutAFarewellFailsItsCallsWithOneLine) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  base::Promise<base::MemberId> dead;
  a.OnPeerDead([&](const base::MemberId& id, absl::Status status) { dead.Set(id); });
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 100; ++i) futures.push_back(a.Call("b", {"park"}, Body("")));
  ASSERT_TRUE(parked_.Await(100));
  ::testing::internal::CaptureStderr();
  b.endpoint()->Close();
  for (auto& future : futures) {
    absl::Status status = future.Wait(kHang).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kMaybe);
    EXPECT_THAT(std::string(status.message()), HasSubstr("park v1 on " + b.self().ToString()));
  }
  auto who = dead.future().Wait(kHang);
  ASSERT_TRUE(who.ok());
  EXPECT_EQ(*who, b.self());
  std::string lines = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(CountText(lines, "peer " + b.self().ToString()), 1) << lines;
  EXPECT_THAT(lines, HasSubstr("calls_in_flight=100"));
  // It stays dead, and that is known before anything is sent.
  absl::Status later = a.Call("b", {"park"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(later));
  EXPECT_EQ(GetRan(later), Ran::kNo);
  EXPECT_FALSE(a.FindPeer("b").has_value());
}

TEST_P(AgentDeathTest, AFarewellIsNoAlarm) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  base::Promise<base::Unit> gone;
  a.OnPeerDead([&](const base::MemberId&, absl::Status) { gone.Set(base::Unit{}); });
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(b.Shutdown(kHang).ok());
  EXPECT_TRUE(gone.future().Wait(kHang).ok());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_TRUE(absl::IsUnavailable(a.Call("b", {"echo"}, Body("")).Wait(kHang).status()));
}

TEST_P(AgentDeathTest, ARestartedMemberTakesItsNameAgain) {
  Agent& a = Start("a");
  Agent& old = Start("b");
  Introduce(a, old);
  ServeEcho(a);
  ServeEcho(old);
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  base::MemberId old_id = old.self();
  // The old life ends without a word; the new one speaks first.
  old.endpoint()->Close();
  Stop("b");
  Agent& fresh = Start("b");
  ServeEcho(fresh);
  fresh.AddPeer({a.self(), a.addresses()});
  auto reply = fresh.Call("a", {"echo"}, Body("new")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  a.AddPeer({fresh.self(), fresh.addresses()});
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  EXPECT_EQ(a.FindPeer("b")->id, fresh.self());
  // Nobody brings the old one back.
  a.AddPeer({old_id, fresh.addresses()});
  EXPECT_EQ(a.FindPeer("b")->id, fresh.self());
}

TEST_P(AgentDeathTest, ANewIncarnationEndsTheCallsOfTheOld) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  auto call = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  a.AddPeer({{"b", base::NewIncarnation()}, b.addresses()});
  absl::Status status = call.Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kMaybe);
  // The address answers as the old one: so the new one is not there.
  EXPECT_EQ(GetRan(a.Call("b", {"park"}, Body("")).Wait(kHang).status()), Ran::kNo);
}

TEST_P(AgentDeathTest, AnAddressWhereNobodyListensIsDeath) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Peer peer{b.self(), b.addresses()};
  Stop("b");
  base::Promise<absl::Status> dead;
  a.OnPeerDead([&](const base::MemberId&, absl::Status status) { dead.Set(status); });
  a.AddPeer(peer);
  absl::Status status = a.Call("b", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kNo);
  EXPECT_THAT(std::string(status.message()), HasSubstr("refused"));
  auto reason = dead.future().Wait(kHang);
  ASSERT_TRUE(reason.ok());
  EXPECT_TRUE(transport::IsRefused(*reason)) << *reason;
  absl::Status met = a.Meet(peer.addresses, kHang).Wait(kHang).status();
  EXPECT_TRUE(transport::IsRefused(met)) << met;
}

TEST_P(AgentDeathTest, AnotherAtTheAddressIsDeath) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  base::Promise<absl::Status> dead;
  a.OnPeerDead([&](const base::MemberId&, absl::Status status) { dead.Set(status); });
  a.AddPeer({{"b", base::NewIncarnation()}, b.addresses()});
  absl::Status status = a.Call("b", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kNo);
  EXPECT_FALSE(a.FindPeer("b").has_value());
  auto reason = dead.future().Wait(kHang);
  ASSERT_TRUE(reason.ok());
  EXPECT_TRUE(transport::IsRefused(*reason)) << *reason;
}

TEST_P(UnreachableTest, AnUnreachablePeerIsDeadAfterTheLimit) {
  // What a text says is no evidence: it is for people.
  for (const char* why : {"network is unreachable", "connect: Connection refused"}) {
    AgentOptions options;
    options.reconnect_limit = absl::Milliseconds(300);
    Agent& a = Start("a", options);
    Agent& b = Start("b");
    Introduce(a, b);
    network_->SetUnreachable(why);
    base::Promise<absl::Status> dead;
    a.OnPeerDead([&](const base::MemberId&, absl::Status status) { dead.Set(status); });
    absl::Status status = a.Call("b", {"echo"}, Body("")).Wait(kHang).status();
    EXPECT_TRUE(absl::IsUnavailable(status));
    EXPECT_EQ(GetRan(status), Ran::kNo);
    auto reason = dead.future().Wait(kHang);
    ASSERT_TRUE(reason.ok());
    EXPECT_FALSE(transport::IsRefused(*reason));
    EXPECT_THAT(std::string(reason->message()), AllOf(HasSubstr("no connection for 300ms"), HasSubstr(why)));
    network_->SetUnreachable("");
    Stop("a");
    Stop("b");
  }
}

// Somebody hangs up at one address, and nobody listens at the other: there may be life.
TEST(AgentRefusal, CountsWhereAllAddressesRefuse) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::string port = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  const std::string unix_name = absl::StrCat("unix:@atoll-test-", base::NewIncarnation().value());
  transport::EndpointOptions options;
  options.job = "agent-test";
  options.self = {"a", base::NewIncarnation()};
  options.key.bytes = "a key of at least sixteen bytes";
  auto endpoint = transport::CreateEndpoint(options);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  auto connect = [&](std::vector<std::string> addresses) {
    base::Promise<base::Unit> promise;
    (*endpoint)->Connect(addresses, {"b", base::Incarnation()}, transport::Lane::kControl, kHang,
                         [promise](absl::StatusOr<std::shared_ptr<transport::Pipe>> pipe) {
                           promise.Set(pipe.ok() ? absl::StatusOr<base::Unit>(base::Unit()) : pipe.status());
                         });
    return promise.future().Wait(kHang).status();
  };
  // Bound, but not listening yet.
  absl::Status status = connect({unix_name, port});
  EXPECT_TRUE(transport::IsRefused(status)) << status;
  EXPECT_TRUE(transport::IsRefused(connect({"unknown:address", port})));
  EXPECT_FALSE(transport::IsRefused(connect({"unknown:address"})));
  ASSERT_EQ(listen(listener, 1), 0);
  std::thread hangs_up([&] { close(accept(listener, nullptr, nullptr)); });
  status = connect({unix_name, port});
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_FALSE(transport::IsRefused(status)) << status;
  shutdown(listener, SHUT_RDWR);
  hangs_up.join();
  close(listener);
}

// Scenario init 10.
// Scenario users 0.
// A process of its own that is killed.
// Scenario rpc 44.
TEST(AgentProcess, KilledWithAHundredCallsInFlight) {
  char self_path[4096];
  ssize_t length = readlink("/proc/self/exe", self_path, sizeof(self_path));
  ASSERT_GT(length, 0);
  std::string helper(self_path, static_cast<size_t>(length));
  helper = helper.substr(0, helper.rfind('/')) + "/rpc_test_peer";
  int in[2], out[2];
  ASSERT_EQ(pipe2(in, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(out, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  pid_t pid = 0;
  char* arguments[] = {helper.data(), nullptr};
  ASSERT_EQ(posix_spawn(&pid, helper.c_str(), &actions, nullptr, arguments, environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  FILE* lines = fdopen(out[0], "r");
  char line[4096] = "";
  ASSERT_NE(fgets(line, sizeof(line), lines), nullptr);
  std::istringstream words(line);
  uint64_t incarnation = 0;
  words >> incarnation;
  Peer peer{{"victim", base::Incarnation(incarnation)}, {}};
  for (std::string address; words >> address;) peer.addresses.push_back(address);

  transport::EndpointOptions endpoint_options;
  endpoint_options.job = "agent-test";
  endpoint_options.self = {"a", base::NewIncarnation()};
  endpoint_options.key.bytes = "a key of at least sixteen bytes";
  auto endpoint = transport::CreateEndpoint(endpoint_options);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  AgentOptions options;
  options.endpoint = *endpoint;
  options.self = endpoint_options.self;
  auto agent = *Agent::Start(options);
  agent->AddPeer(peer);
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 100; ++i) {
    Payload request = Body("");
    if (i % 10 == 0) request.tensors.push_back(Copy(at::ones({1 << 20})));
    futures.push_back(agent->Call("victim", {"park"}, std::move(request)));
  }
  std::string parked;
  while (parked != "100") {
    auto count = agent->Call("victim", {"parked"}, Body("")).Wait(kHang);
    ASSERT_TRUE(count.ok()) << count.status();
    parked = count->body;
  }
  ::testing::internal::CaptureStderr();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  for (auto& future : futures) {
    absl::Status status = future.Wait(kHang).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kMaybe);
    std::string text(status.message());
    EXPECT_THAT(text, HasSubstr("park v1 on " + peer.id.ToString() + " at unix:@"));
  }
  agent = nullptr;
  std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(CountText(log, "\n"), 1) << log;
  EXPECT_THAT(log, HasSubstr("calls_in_flight=100"));
  fclose(lines);
  close(in[1]);
}

}  // namespace
}  // namespace Atoll::rpc
