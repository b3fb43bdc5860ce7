// Interceptors, and the metadata that is theirs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

class AgentInterceptTest : public AgentTest {};
INSTANTIATE_AGENT_TESTS(AgentInterceptTest);

// Numbers the calls that go out; where they arrive, puts what it saw into the answer.
class Tracer : public Interceptor {
 public:
  absl::Status OnCall(OutgoingCall& call) override {
    call.request.metadata["trace.id"] = absl::StrCat(call.method.name, "-", ++calls_);
    if (call.one_way) return absl::OkStatus();
    call.on_reply = [this, inner = std::move(call.on_reply)](absl::StatusOr<Received> reply) mutable {
      if (reply.ok()) {
        absl::MutexLock lock(&mu_);
        answered_.push_back(reply->metadata["trace.seen"]);
      }
      std::move(inner)(std::move(reply));
    };
    return absl::OkStatus();
  }
  absl::Status OnServe(ServerCall& call) override {
    const std::string id = call.request.metadata["trace.id"];
    {
      absl::MutexLock lock(&mu_);
      served_.push_back(id);
    }
    call.responder =
        Responder::From([id, inner = std::move(call.responder)](absl::StatusOr<Payload> reply) mutable {
          if (reply.ok()) reply->metadata["trace.seen"] = id;
          std::move(inner).Reply(std::move(reply));
        });
    return absl::OkStatus();
  }

  std::vector<std::string> served() {
    absl::MutexLock lock(&mu_);
    return served_;
  }
  std::vector<std::string> answered() {
    absl::MutexLock lock(&mu_);
    return answered_;
  }

 private:
  std::atomic<int> calls_{0};
  absl::Mutex mu_;
  std::vector<std::string> served_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> answered_ ABSL_GUARDED_BY(mu_);
};

class Refuses : public Interceptor {
 public:
  enum class When { kCall, kServe, kThrowInCall, kThrowInServe };
  explicit Refuses(When when) : when_(when) {}
  absl::Status OnCall(OutgoingCall&) override {
    if (when_ == When::kThrowInCall) throw std::runtime_error("thrown by OnCall");
    return when_ == When::kCall ? absl::PermissionDeniedError("not from here") : absl::OkStatus();
  }
  absl::Status OnServe(ServerCall&) override {
    if (when_ == When::kThrowInServe) throw std::runtime_error("thrown by OnServe");
    return when_ == When::kServe ? absl::PermissionDeniedError("not here") : absl::OkStatus();
  }

 private:
  const When when_;
};

TEST_P(AgentInterceptTest, SeesCallsOnBothSidesAndPutsMetadataBesideThem) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(a);
  ServeEcho(b);
  auto here = std::make_shared<Tracer>();
  auto there = std::make_shared<Tracer>();
  a.AddInterceptor(here);
  b.AddInterceptor(there);
  for (const char* to : {"b", "a"}) {
    auto reply = a.Call(to, {"echo"}, Body("x")).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, "x");
  }
  ASSERT_TRUE(a.Send("b", {"echo"}, Body("")).Wait(kHang).ok());
  EXPECT_THAT(here->answered(), ElementsAre("echo-1", "echo-2"));
  EXPECT_THAT(there->served(), ElementsAre("echo-1", "echo-3"));
  EXPECT_THAT(here->served(), ElementsAre("echo-2"));
}

TEST_P(AgentInterceptTest, WithoutATimeoutTheAgentsCounts) {
  class Forgets : public Interceptor {
    absl::Status OnCall(OutgoingCall& call) override {
      EXPECT_EQ(call.options.timeout, absl::Minutes(1));
      call.options.timeout.reset();
      return absl::OkStatus();
    }
  };
  Agent& a = Start("a");
  ServeEcho(a);
  a.AddInterceptor(std::make_shared<Forgets>());
  EXPECT_TRUE(a.Call("a", {"echo"}, Body("")).Wait(kHang).ok());
}

TEST_P(AgentInterceptTest, RefusalsAreOfTheCallAndItDidNotRun) {
  using When = Refuses::When;
  struct Case {
    When when;
    absl::StatusCode code;
    const char* text;
  };
  const Case cases[] = {{When::kCall, absl::StatusCode::kPermissionDenied, "not from here"},
                        {When::kServe, absl::StatusCode::kPermissionDenied, "not here"},
                        {When::kThrowInCall, absl::StatusCode::kInternal, "thrown by OnCall"},
                        {When::kThrowInServe, absl::StatusCode::kInternal, "thrown by OnServe"}};
  for (size_t i = 0; i < std::size(cases); ++i) {
    const std::string caller = absl::StrCat("a", i), callee = absl::StrCat("b", i);
    Agent& a = Start(caller);
    Agent& b = Start(callee);
    Introduce(a, b);
    std::atomic<int> ran{0};
    for (Agent* agent : {&a, &b}) {
      ASSERT_TRUE(agent
                      ->Register({"count"},
                                 [&](ServerCall call) {
                                   ++ran;
                                   std::move(call.responder).Reply(Payload());
                                 })
                      .ok());
    }
    auto refuses = std::make_shared<Refuses>(cases[i].when);
    const bool calls = cases[i].when == When::kCall || cases[i].when == When::kThrowInCall;
    (calls ? a : b).AddInterceptor(refuses);
    auto check = [&](const absl::Status& status) {
      EXPECT_EQ(status.code(), cases[i].code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(cases[i].text));
      EXPECT_EQ(GetRan(status), Ran::kNo) << status;
    };
    absl::Notification returned;
    Payload lent;
    lent.tensors.push_back(Lend(at::ones({3}), [&] { returned.Notify(); }));
    check(a.Call(callee, {"count"}, std::move(lent)).Wait(kHang).status());
    EXPECT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
    check(a.Send(callee, {"count"}, Body("")).Wait(kHang).status());
    // And to itself.
    Agent& own = calls ? a : b;
    check(own.Call(own.self().name, {"count"}, Body("")).Wait(kHang).status());
    EXPECT_EQ(ran.load(), 0);
    Stop(caller);
    Stop(callee);
  }
}

TEST_P(AgentInterceptTest, SeveralRunInTheOrderInWhichTheyWereAdded) {
  class Appends : public Interceptor {
   public:
    explicit Appends(char letter) : letter_(letter) {}
    absl::Status OnCall(OutgoingCall& call) override {
      call.request.body += letter_;
      return absl::OkStatus();
    }

   private:
    const char letter_;
  };
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  a.AddInterceptor(std::make_shared<Appends>('1'));
  a.AddInterceptor(std::make_shared<Appends>('2'));
  auto reply = a.Call("b", {"echo"}, Body("0")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "012");
}

TEST_P(AgentInterceptTest, MetadataHasLimits) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ASSERT_TRUE(b.Register({"metadata"}, [](ServerCall call) {
                 Payload reply;
                 reply.metadata = std::move(call.request.metadata);
                 std::move(call.responder).Reply(std::move(reply));
               }).ok());
  auto call = [&](Metadata metadata) {
    Payload request;
    request.metadata = std::move(metadata);
    return a.Call("b", {"metadata"}, std::move(request)).Wait(kHang);
  };
  Metadata full;
  for (int i = 0; i < 64; ++i) full[absl::StrCat("key.", i)] = std::string(200, '\0');
  auto reply = call(full);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->metadata, full);
  Metadata more = full;
  more["another"] = "";
  EXPECT_THAT(std::string(call(more).status().message()), HasSubstr("metadata of 65 entries"));
  EXPECT_THAT(std::string(call({{"Key", ""}}).status().message()), HasSubstr("'Key'"));
  EXPECT_THAT(std::string(call({{"", ""}}).status().message()), HasSubstr("a key of metadata"));
  EXPECT_THAT(std::string(call({{"k", std::string(17000, 'x')}}).status().message()),
              HasSubstr("17001 bytes"));
  EXPECT_TRUE(call({{std::string(64, 'k'), "v"}}).ok());
  EXPECT_FALSE(call({{std::string(65, 'k'), "v"}}).ok());
}

}  // namespace
}  // namespace Atoll::rpc
