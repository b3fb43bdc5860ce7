// What is too much: for a message, for a backlog, for a peer that opens pipes and says nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::AllOf;
using ::testing::HasSubstr;

Payload Ones(const std::vector<int64_t>& counts) {
  Payload payload;
  for (int64_t count : counts) payload.tensors.push_back(Copy(at::ones({count})));
  return payload;
}

constexpr transport::MessageLimits kSmall{128 << 10, 2, 1 << 20};

class AgentLimitsTest : public AgentTest {
 protected:
  // a with the usual limits, b with small ones.
  void StartBoth() {
    a_ = &Start("a");
    limits_ = kSmall;
    b_ = &Start("b");
    Introduce(*a_, *b_);
    ServeEcho(*a_);
    ServeEcho(*b_);
  }
  Agent* a_ = nullptr;
  Agent* b_ = nullptr;
};
INSTANTIATE_AGENT_TESTS(AgentLimitsTest);

TEST_P(AgentLimitsTest, AMessageAboveTheReceiversLimitsFailsAlone) {
  StartBoth();
  const std::string half(kSmall.max_header_bytes / 2, 'x');
  const std::string whole(kSmall.max_header_bytes, 'x');
  for (int connected = 0; connected < 2; ++connected) {
    // The first round finds no pipe yet: the limits become known with it.
    for (bool one_way : {false, true}) {
      auto call = [&](Payload payload) {
        return one_way ? a_->Send("b", {"echo"}, std::move(payload)).Wait(kHang).status()
                       : a_->Call("b", {"echo"}, std::move(payload)).Wait(kHang).status();
      };
      absl::Status header = call(Body(whole));
      EXPECT_TRUE(absl::IsInvalidArgument(header)) << header;
      EXPECT_EQ(GetRan(header), Ran::kNo);
      EXPECT_THAT(std::string(header.message()), AllOf(HasSubstr("echo v1 on b#"), HasSubstr("131072")));
      absl::Status count = call(Ones({1 << 17, 1 << 17, 1 << 17}));
      EXPECT_TRUE(absl::IsInvalidArgument(count)) << count;
      EXPECT_THAT(std::string(count.message()), HasSubstr("3 tensors; the receiver takes 2"));
      absl::Status size = call(Ones({(1 << 18) + 1}));
      EXPECT_TRUE(absl::IsInvalidArgument(size)) << size;
      EXPECT_THAT(std::string(size.message()), HasSubstr("the receiver takes 1048576"));
      // What is at the limits travels, behind them in the same lanes.
      absl::Status fits = call(Ones({1 << 18, 1 << 18}));
      EXPECT_TRUE(fits.ok()) << fits;
      fits = call(Body(half));
      EXPECT_TRUE(fits.ok()) << fits;
    }
  }
  if (fake()) {
    EXPECT_LE(network_->connects(), 8u);
  }
}

TEST_P(AgentLimitsTest, AReplyAboveTheCallersLimitsIsAnError) {
  StartBoth();
  ASSERT_TRUE(a_->Register({"much"}, [](ServerCall call) {
                  std::move(call.responder).Reply(Ones({1 << 17, 1 << 17, 1 << 17}));
                }).ok());
  for (int i = 0; i < 3; ++i) {
    absl::Status status = b_->Call("a", {"much"}, Body("")).Wait(kHang).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kYes);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("its reply"), HasSubstr("takes 2")));
    EXPECT_TRUE(b_->Call("a", {"echo"}, Ones({1 << 18})).Wait(kHang).ok());
  }
  if (fake()) {
    EXPECT_LE(network_->connects(), 8u);
  }
}

TEST_P(AgentLimitsTest, OurOwnLimitsAreSaidBeforeAnythingIsSent) {
  StartBoth();
  for (Payload& payload : std::array<Payload, 3>{Body(std::string(kSmall.max_header_bytes, 'x')),
                                                 Ones({1, 1, 1}), Ones({(1 << 18) + 1})}) {
    absl::Status status = b_->Call("a", {"echo"}, std::move(payload)).Wait(kHang).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
  }
  if (fake()) {
    EXPECT_EQ(network_->connects(), 0u);
  }
}

TEST_P(AgentLimitsTest, AnEndpointForTinyHeadersIsRefused) {
  limits_.max_header_bytes = 4096;
  AgentOptions options;
  options.self = {"tiny", base::NewIncarnation()};
  options.endpoint = NewEndpoint(options.self);
  absl::Status status = Agent::Start(options).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("at least 131072"));
}

TEST_P(AgentLimitsTest, ABacklogIsBoundedAndWhatIsTakenRunsOnce) {
  Agent& a = Start("a");
  AgentOptions small;
  small.worker_threads = 1;
  small.backlog_bytes = 1 << 20;
  Agent& b = Start("b", small);
  Introduce(a, b);
  absl::Notification blocked, release;
  std::atomic<int> ran{0};
  ASSERT_TRUE(b.Register({"block"}, [&](ServerCall call) {
                 blocked.Notify();
                 release.WaitForNotification();
                 std::move(call.responder).Reply(Body(""));
               }).ok());
  ASSERT_TRUE(b.Register({"note"}, [&](ServerCall call) {
                 ++ran;
                 std::move(call.responder).Reply(Body(""));
               }).ok());
  auto block = a.Call("b", {"block"}, Body(""));
  ASSERT_TRUE(blocked.WaitForNotificationWithTimeout(kHang));
  // In the header, and of tensors that travel on their own; one way, and calls.
  int taken = 0;
  int refused = 0;
  std::vector<base::Future<Received>> calls;
  while (refused < 4) {
    Payload payload = refused % 2 == 0 ? Body(std::string(100'000, 'x')) : Ones({25'000});
    absl::Status status = a.Send("b", {"note"}, std::move(payload)).Wait(kHang).status();
    taken += status.ok();
    ASSERT_LE(taken, 10);
    if (status.ok()) continue;
    ++refused;
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
    status = a.Call("b", {"note"}, Ones({25'000})).Wait(kHang).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
  }
  EXPECT_EQ(taken, 10);
  release.Notify();
  EXPECT_TRUE(block.Wait(kHang).ok());
  // A small one has room while the others still wait, and runs behind them.
  EXPECT_TRUE(a.Call("b", {"note"}, Body("")).Wait(kHang).ok());
  EXPECT_EQ(ran, taken + 1);
  Stop("a");
  Stop("b");
}

TEST_P(AgentLimitsTest, AOneWayCallThatIsRefusedSaysSo) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  MethodOptions none;
  none.allocate = [](auto&&...) { return absl::PermissionDeniedError("not here"); };
  ASSERT_TRUE(b.Register(
                   {"choosy"}, [](ServerCall) {}, std::move(none))
                  .ok());
  absl::Status unknown = a.Send("b", {"nothing"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsNotFound(unknown)) << unknown;
  EXPECT_EQ(GetRan(unknown), Ran::kNo);
  for (int64_t count : {10, 1 << 18}) {
    absl::Status choosy = a.Send("b", {"choosy"}, Ones({count})).Wait(kHang).status();
    EXPECT_TRUE(absl::IsPermissionDenied(choosy)) << choosy;
    EXPECT_EQ(GetRan(choosy), Ran::kNo);
  }
}

TEST_P(AgentLimitsTest, TimersDoNotPileUp) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  ServePark(b);
  // One call that waits all the time, as a poll does; others come and go, and so do delayed acknowledgements.
  auto waits = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  const size_t at_first = a.timer()->pending() + b.timer()->pending();
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  }
  EXPECT_LE(a.timer()->pending() + b.timer()->pending(), at_first + 20);
  parked_.Take().clear();
}

class FakeLimitsTest : public AgentLimitsTest {};
INSTANTIATE_FAKE_AGENT_TESTS(FakeLimitsTest);

TEST_P(FakeLimitsTest, PipesThatSayNothingAreFewAndEnd) {
  auto clock = std::make_shared<base::FakeClock>(absl::UnixEpoch() + absl::Hours(1));
  AgentOptions options;
  options.clock = clock.get();
  Agent& b = Start("b", options);
  auto stranger = NewEndpoint({"s", base::NewIncarnation()});
  std::atomic<int> ended{0};
  std::vector<std::shared_ptr<transport::Pipe>> pipes;
  for (int i = 0; i < 20; ++i) {
    base::Promise<std::shared_ptr<transport::Pipe>> opened;
    stranger->Connect(b.addresses(), {}, transport::Lane::kControl, kHang,
                      [opened](auto pipe) { opened.Set(std::move(pipe)); });
    pipes.push_back(*opened.future().Wait(kHang));
    pipes.back()->ReadDescriptor([&](absl::StatusOr<transport::Descriptor> in) { ended += !in.ok(); });
  }
  EXPECT_TRUE(Eventually([&] { return ended == 12; })) << ended;
  clock->Advance(absl::Seconds(11));
  EXPECT_TRUE(Eventually([&] { return ended == 20; })) << ended;
  stranger->Close();
  stranger->Join();
  Stop("b");
}

TEST_P(FakeLimitsTest, TimeSpentWaitingIsNotGivenTwice) {
  auto clock = std::make_shared<base::FakeClock>(absl::UnixEpoch() + absl::Hours(1));
  AgentOptions options;
  options.clock = clock.get();
  options.reconnect_limit = absl::Hours(1);
  Agent& a = Start("a", options);
  Agent& b = Start("b", options);
  Introduce(a, b);
  base::Promise<absl::Duration> left;
  ASSERT_TRUE(b.Register({"left"}, [&, clock](ServerCall call) {
                 left.Set(call.deadline - clock->Now());
                 std::move(call.responder).Reply(Body(""));
               }).ok());
  network_->SetUnreachable("the cable is out");
  CallOptions minute;
  minute.timeout = absl::Seconds(60);
  auto call = a.Call("b", {"left"}, Body(""), minute);
  clock->Advance(absl::Seconds(40));
  network_->SetUnreachable("");
  // The next attempt comes at most last_backoff later.
  auto answered = std::make_shared<std::atomic<bool>>(false);
  call.Then([answered](const auto&) { answered->store(true); });
  EXPECT_TRUE(Eventually([&] {
    if (!answered->load() && clock->Now() < absl::UnixEpoch() + absl::Hours(1) + absl::Seconds(55)) {
      clock->Advance(absl::Milliseconds(1));
    }
    return answered->load();
  }));
  absl::StatusOr<absl::Duration> had = left.future().Wait(kHang);
  ASSERT_TRUE(had.ok()) << had.status();
  EXPECT_LE(*had, absl::Seconds(20));
  EXPECT_GT(*had, absl::ZeroDuration());
  Stop("a");
  Stop("b");
}

TEST_P(FakeLimitsTest, AReplyThatLandsWhileItsSessionEndsIsAnswered) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  network_->HoldReads(true);
  network_->FinishReadsAtTheEnd();
  // The request is read too: only the reply is to be held.
  ASSERT_TRUE(
      b.Register({"fill"}, [](ServerCall call) { std::move(call.responder).Reply(Ones({1 << 18})); }).ok());
  CallOptions into;
  into.reply_into.push_back(at::zeros({1 << 18}));
  at::Tensor landed = into.reply_into[0];
  auto call = a.Call("b", {"fill"}, Body(""), std::move(into));
  ASSERT_TRUE(Eventually([&] { return network_->held_reads() > 0; }));
  a.RemovePeer(b.self(), absl::UnavailableError("test"));
  absl::StatusOr<Received> reply = call.Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(landed.sum().item<float>(), float{1 << 18});
}

TEST_P(FakeLimitsTest, ABrokenEndpointEndsEveryCallAtOnce) {
  AgentOptions patient;
  patient.reconnect_limit = absl::Hours(1);
  Agent& a = Start("a", patient);
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  base::Promise<std::string> dead;
  a.OnPeerDead([dead](const base::MemberId& id, const absl::Status&) { dead.Set(id.name); });
  auto call = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  network_->Break("a");
  absl::Status status = call.Wait(kHang).status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kMaybe);
  EXPECT_EQ(dead.future().Wait(kHang).value_or(""), "b");
  a.AddPeer({{"c", base::NewIncarnation()}, {"fake:c"}});
  status = a.Call("c", {"park"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kNo);
  parked_.Take().clear();
}

TEST_P(FakeLimitsTest, NobodyIsMetAtTheEnd) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  ASSERT_TRUE(a.Shutdown(kHang).ok());
  EXPECT_TRUE(absl::IsCancelled(a.Meet(b.addresses(), kHang).Wait(kHang).status()));
}

}  // namespace
}  // namespace Atoll::rpc
