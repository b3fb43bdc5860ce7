// References that outlive their space and its agent, or nearly.
#include <atomic>
#include <memory>
#include <thread>

#include <gtest/gtest.h>

#include "../in_child.h"
#include "atoll/transport/endpoint.h"
#include "testing.h"

namespace Atoll::rref {
namespace {

// An agent of which nobody is to make use after its end. Its first call of an object stops in the middle
// while the gate is shut.
class GateAgent : public rpc::Agent {
 public:
  struct Gate {
    std::atomic<bool> used{false};
    absl::Notification entered, open, agent_gone;
  };
  GateAgent(rpc::Agent* agent, Gate* gate) : agent_(agent), gate_(gate) {}
  ~GateAgent() override { gate_->agent_gone.Notify(); }

  using rpc::Agent::Call;
  void Call(absl::string_view to, const rpc::MethodId& method, rpc::Payload request, rpc::CallOptions options,
            rpc::OnReply on_reply) override {
    if (method.name == "rref.call" && !gate_->used.exchange(true)) {
      gate_->entered.Notify();
      gate_->open.WaitForNotification();
      EXPECT_FALSE(gate_->agent_gone.HasBeenNotified()) << "in the middle of a call";
    }
    agent_->Call(to, method, std::move(request), std::move(options), std::move(on_reply));
  }
  base::Future<base::Unit> Send(absl::string_view to, const rpc::MethodId& method,
                                rpc::Payload request) override {
    return agent_->Send(to, method, std::move(request));
  }
  absl::Status Register(rpc::MethodId method, rpc::Handler handler, rpc::MethodOptions options) override {
    return agent_->Register(std::move(method), std::move(handler), std::move(options));
  }
  void AddInterceptor(std::shared_ptr<rpc::Interceptor> interceptor) override {
    agent_->AddInterceptor(std::move(interceptor));
  }
  void AddPeer(rpc::Peer peer) override { agent_->AddPeer(std::move(peer)); }
  void RemovePeer(const base::MemberId& id, absl::Status reason) override {
    agent_->RemovePeer(id, std::move(reason));
  }
  std::optional<rpc::Peer> FindPeer(absl::string_view name) const override { return agent_->FindPeer(name); }
  base::Future<base::MemberId> Meet(std::vector<std::string> addresses, absl::Duration limit) override {
    return agent_->Meet(std::move(addresses), limit);
  }
  void OnPeerDead(std::function<void(const base::MemberId&, absl::Status)> observer) override {
    agent_->OnPeerDead(std::move(observer));
  }
  const base::MemberId& self() const override { return agent_->self(); }
  std::vector<std::string> addresses() const override { return agent_->addresses(); }
  base::Executor* pool() override { return agent_->pool(); }
  base::Timer* timer() override { return agent_->timer(); }
  const base::Clock* clock() const override { return agent_->clock(); }
  absl::Time LastHeard(const base::MemberId& id) const override { return agent_->LastHeard(id); }
  transport::Endpoint* endpoint() override { return agent_->endpoint(); }
  absl::Status Shutdown(absl::Duration limit) override { return agent_->Shutdown(limit); }

 private:
  rpc::Agent* const agent_;
  Gate* const gate_;
};

class ClosingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    transport::EndpointOptions endpoint;
    endpoint.job = "closing-test";
    endpoint.self = {"self", base::NewIncarnation()};
    endpoint.key.bytes = "a key of at least sixteen bytes";
    rpc::AgentOptions options;
    options.self = endpoint.self;
    options.endpoint = *transport::CreateEndpoint(endpoint);
    agent_ = *rpc::Agent::Start(options);
    gated_ = std::make_unique<GateAgent>(agent_.get(), &gate_);
    objects_ = *ObjectSpace::Create(gated_.get());
    ASSERT_TRUE(objects_->RegisterClass("Test", TestFactory(&record_)).ok());
    auto rref = objects_->Create("self", "Test", Body("text")).Wait(kHang);
    ASSERT_TRUE(rref.ok()) << rref.status();
    rref_ = *rref;
  }
  void Close() {
    objects_.reset();
    gated_.reset();
  }

  Record record_;
  GateAgent::Gate gate_;
  std::unique_ptr<rpc::Agent> agent_;
  std::unique_ptr<GateAgent> gated_;
  std::unique_ptr<ObjectSpace> objects_;
  std::shared_ptr<RRef> rref_;
};

TEST_F(ClosingTest, ASpaceWaitsForACallThatIsBeingMade) {
  std::thread caller([&] { rref_->Call({"get"}, Body("")).Wait(kHang).status().IgnoreError(); });
  gate_.entered.WaitForNotification();
  std::thread closer([&] { Close(); });
  while (rref_->Call({"get"}, Body("")).Wait(kHang).ok()) std::this_thread::yield();
  EXPECT_EQ(RefusedElsewhere(*rref_, "get").code(), absl::StatusCode::kFailedPrecondition);
  gate_.open.Notify();
  caller.join();
  closer.join();
  EXPECT_TRUE(gate_.agent_gone.HasBeenNotified());
}

TEST_F(ClosingTest, InAChildOfForkCallsEndInsideThem) {
  auto child = [this]() -> std::string {
    std::string ends;
    rpc::Payload request;
    request.tensors.push_back(rpc::Lend(at::zeros({4}), [&] { ends += "loan,"; }));
    rref_->Call({"get"}, std::move(request), {}, [&](absl::StatusOr<rpc::Received> reply) {
      ends += std::string(absl::StatusCodeToString(reply.status().code()));
    });
    if (ends != "loan,FAILED_PRECONDITION") return "the ends of a call were: " + ends;
    const std::string wrong =
        Atoll::testing::WrongInChild(objects_->Find("self", "x").Wait(kHang).status(), "Find");
    if (!wrong.empty()) return wrong;
    rref_.reset();
    objects_.reset();
    _exit(0);  // No search for leaks: what the parent's threads hold looks lost here.
  };
  EXPECT_EQ(Atoll::testing::InChild(child), 0);
}

TEST_F(ClosingTest, ACallThatGoesNowhereEndsInAnotherThread) {
  gate_.open.Notify();
  EXPECT_EQ(RefusedElsewhere(*rref_, "odd\nname").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RefusedElsewhere(*rref_, std::string(129, 'a')).code(), absl::StatusCode::kInvalidArgument);
  Close();
  EXPECT_EQ(RefusedElsewhere(*rref_, "get").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(RefusedElsewhere(RRef(), "get").code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace Atoll::rref
