// Host names: while the system's resolver hangs, and those with several addresses.
#include "atoll/transport/resolver.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/tests/transport/testing.h"

namespace Atoll::transport::testing {
namespace {

constexpr char kHangs[] = "hangs.invalid";
// Names of several addresses: of this machine, and one that is not ours to bind before them.
constexpr char kSeveral[] = "several.invalid";
constexpr char kForeign[] = "foreign.invalid";

/// What the resolver is asked about kHangs waits here.
struct Gate {
  absl::Mutex mu;
  bool open ABSL_GUARDED_BY(mu) = true;
  int waiting ABSL_GUARDED_BY(mu) = 0;

  void Set(bool to) {
    absl::MutexLock lock(&mu);
    open = to;
  }
  void Pass() {
    absl::MutexLock lock(&mu);
    ++waiting;
    auto is_open = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return open; };
    mu.Await(absl::Condition(&is_open));
    --waiting;
  }
  bool AwaitWaiting(int count) {
    absl::MutexLock lock(&mu);
    auto there = [this, count]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return waiting == count; };
    return mu.AwaitWithTimeout(absl::Condition(&there), kLimit);
  }
};

Gate& gate() {
  static Gate* const gate = new Gate;
  return *gate;
}

}  // namespace
}  // namespace Atoll::transport::testing

// In place of the C library's.
extern "C" int getaddrinfo(const char* host, const char* service, const addrinfo* hints, addrinfo** found) {
  if (host != nullptr && std::strcmp(host, Atoll::transport::testing::kHangs) == 0)
    Atoll::transport::testing::gate().Pass();
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  for (const char* name : {Atoll::transport::testing::kSeveral, Atoll::transport::testing::kForeign}) {
    if (host == nullptr || std::strcmp(host, name) != 0) continue;
    const bool foreign = name == Atoll::transport::testing::kForeign;
    addrinfo literal = *hints;
    literal.ai_flags |= AI_NUMERICHOST;
    for (const char* one : {foreign ? "198.51.100.1" : "127.0.0.8", "127.0.0.9", "127.0.0.1"}) {
      if (const int error = next(one, service, &literal, found); error != 0) return error;
      while (*found != nullptr) found = &(*found)->ai_next;
    }
    return 0;
  }
  return next(host, service, hints, found);
}

namespace Atoll::transport::testing {
namespace {

class HangingResolverTest : public ::testing::Test {
 protected:
  HangingResolverTest() { gate().Set(false); }
  ~HangingResolverTest() override {
    gate().Set(true);
    EXPECT_TRUE(gate().AwaitWaiting(0));
  }
  base::Future<std::shared_ptr<Pipe>> Start(Member& member, absl::Duration limit) {
    base::Promise<std::shared_ptr<Pipe>> promise;
    member.endpoint().Connect(
        {absl::StrCat(kHangs, ":1")}, {}, Lane::kControl, limit,
        [promise](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { promise.Set(std::move(pipe)); });
    return promise.future();
  }
};

TEST_F(HangingResolverTest, TheLimitOfAConnectCoversIt) {
  Member member(Options("member"));
  auto pipe = Start(member, absl::Milliseconds(20)).Wait(kLimit);
  EXPECT_TRUE(absl::IsDeadlineExceeded(pipe.status())) << pipe.status();
  EXPECT_TRUE(absl::StrContains(pipe.status().message(), kHangs)) << pipe.status();
  EXPECT_TRUE(gate().AwaitWaiting(1));
}

TEST_F(HangingResolverTest, OtherNamesAreNotHeldUp) {
  Member member(Options("member")), server(Options("server"));
  auto hangs = Start(member, kLimit);
  EXPECT_TRUE(gate().AwaitWaiting(1));
  auto pipe = member.Connect({absl::StrCat("localhost:", server.endpoint().port())}, server.id());
  EXPECT_TRUE(pipe.ok()) << pipe.status();
  EXPECT_FALSE(hangs.ready());
}

TEST_F(HangingResolverTest, TheEndDoesNotWaitForIt) {
  auto member = std::make_unique<Member>(Options("member"));
  std::vector<base::Future<std::shared_ptr<Pipe>>> pipes;
  for (int i = 0; i < 10; ++i) pipes.push_back(Start(*member, kLimit));  // More than it has threads.
  EXPECT_TRUE(gate().AwaitWaiting(4));
  member.reset();
  for (const auto& pipe : pipes) {
    ASSERT_TRUE(pipe.ready());
    EXPECT_TRUE(absl::IsCancelled(pipe.Wait(kLimit).status()));
  }
}

TEST(Resolver, AHostNameAfterTheEndIsRefused) {
  auto endpoint = CreateEndpoint(Options("member"));
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  (*endpoint)->Close();
  (*endpoint)->Join();
  absl::Status status;
  (*endpoint)->Connect({"localhost:1"}, {}, Lane::kControl, kLimit,
                       [&](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { status = pipe.status(); });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
}

// Scenario users 34.
TEST(Resolver, EveryAddressOfANameIsTried) {
  EndpointOptions options = Options("server");
  Member server(options), client(Options("client"));
  const std::string name = absl::StrCat(kSeveral, ":", server.endpoint().port());
  auto pipe = client.Connect({name}, server.id());
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  EXPECT_EQ((*pipe)->peer().address, absl::StrCat("127.0.0.1:", server.endpoint().port()));
}

// Scenario users 34.
TEST(Resolver, OfANameToBindTheFirstAddressThatIsOursIsTaken) {
  EndpointOptions options = Options("server");
  options.bind = kForeign;
  Member server(options);
  ASSERT_EQ(server.endpoint().addresses().size(), 1u);
  EXPECT_TRUE(absl::StartsWith(server.endpoint().addresses()[0], "127.0.0.9:"))
      << server.endpoint().addresses()[0];
}

}  // namespace
}  // namespace Atoll::transport::testing
