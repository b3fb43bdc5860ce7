// A child of fork can use no agent of its parent, and harms neither it nor its peers.
#include <atomic>
#include <optional>

#include "../in_child.h"
#include "agent_fixture.h"

namespace Atoll::rpc {
namespace {

using Atoll::testing::InChild;
using Atoll::testing::WrongInChild;

class ForkTest : public AgentTest {
 protected:
  void SetUp() override {
    caller_ = &Start("caller");
    Agent& callee = Start("callee");
    ServeEcho(callee);
    ServeEcho(*caller_);
    ASSERT_TRUE(callee
                    .Register({"later"},
                              [this](ServerCall call) {
                                held_ = std::move(call.responder);
                                holds_.Notify();
                              })
                    .ok());
    Introduce(*caller_, callee);
  }

  void OneCall(const std::string& to = "callee") {
    auto reply = caller_->Call(to, {"echo"}, Body("hello")).Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->body, "hello");
  }

  // Everything that there is to call, and then the destructors.
  std::string UseAll() {
    std::string wrong;
    Agent& agent = *caller_;
    for (const char* to : {"callee", "caller", "nobody"}) {
      int answers = 0, returned = 0;
      Payload request = Body("from the child");
      request.tensors.push_back(Lend(at::ones({4}), [&] { ++returned; }));
      agent.Call(to, {"echo"}, std::move(request), {}, [&](absl::StatusOr<Received> reply) {
        ++answers;
        wrong += WrongInChild(reply.status(), "Call");
        if (base::GetRan(reply.status()) != base::Ran::kNo) wrong += "a call may have run";
      });
      request = Body("one way");
      request.tensors.push_back(Lend(at::ones({4}), [&] { ++returned; }));
      wrong += WrongInChild(agent.Send(to, {"echo"}, std::move(request)).Wait(kHang).status(), "Send");
      if (answers != 1 || returned != 2) wrong += "an answer, or a loan, did not come back";
      wrong += WrongInChild(agent.Call(to, {"echo"}, Body("x")).Wait(kHang).status(), "Call (future)");
    }
    wrong += WrongInChild(agent.Register({"new"}, [](ServerCall) {}), "Register");
    wrong += WrongInChild(agent.Meet(agent.addresses(), kHang).Wait(kHang).status(), "Meet");
    wrong += WrongInChild(agent.Shutdown(kHang), "Shutdown");
    agent.AddPeer({{"other", base::NewIncarnation()}, agent.addresses()});
    agent.RemovePeer(agents_["callee"]->self(), absl::UnavailableError("says the child"));
    agent.OnPeerDead([](const base::MemberId&, absl::Status) {});
    if (agent.FindPeer("callee").has_value()) wrong += "a child has peers";
    if (held_.has_value()) {
      int returned = 0;
      Payload reply = Body("from the child");
      reply.tensors.push_back(Lend(at::ones({4}), [&] { ++returned; }));
      std::move(*held_).Reply(std::move(reply));
      if (returned != 1) wrong += "the loan of a reply did not come back";
      held_.reset();
    }
    agents_.clear();
    return wrong;
  }

  Agent* caller_ = nullptr;
  std::optional<Responder> held_;
  absl::Notification holds_;
};

TEST_P(ForkTest, AChildIsToldSoAndTheParentGoesOn) {
  OneCall();
  auto later = caller_->Call("callee", {"later"}, Body("x"));
  ASSERT_TRUE(holds_.WaitForNotificationWithTimeout(kHang));
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(InChild([this] { return UseAll(); }), 0);
    OneCall();
    OneCall("caller");
  }
  EXPECT_FALSE(later.ready());
  std::move(*held_).Reply(Body("from the parent"));
  auto answer = later.Wait(kHang);
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->body, "from the parent");
}

TEST_P(ForkTest, LocksThatAreHeldWhileForkingDoNotMatter) {
  ATOLL_SKIP_IF_A_BUSY_FORK_HANGS();
  std::atomic<bool> enough{false};
  std::vector<std::thread> busy;
  for (const char* to : {"callee", "caller"}) {
    busy.emplace_back([this, to, &enough] {
      while (!enough) OneCall(to);
    });
  }
  for (int i = 0; i < 6; ++i) EXPECT_EQ(InChild([this] { return UseAll(); }), 0);
  enough = true;
  for (std::thread& thread : busy) thread.join();
  OneCall();
  EXPECT_TRUE(caller_->Shutdown(kHang).ok());
}

INSTANTIATE_TEST_SUITE_P(FakeAndReal, ForkTest, ::testing::Values(Over::kFake, Over::kReal));

}  // namespace
}  // namespace Atoll::rpc
