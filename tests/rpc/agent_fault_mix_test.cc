// Calls both ways at once, small ones and of a MiB, over pipes with one fault in ten messages. What a session mends
// shows nowhere; what it cannot mend, because a time runs out or a peer ends, ends once and says truly whether it ran.
//
// The faults are drawn from a seed, which is printed: always the same, or what ATOLL_FAULT_SEED says.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"
#include "atoll/transport/fault_injector.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using transport::FaultInjector;
using transport::FaultPlan;

class AgentFaultMixTest : public AgentTest {
 protected:
  enum class Ends { kAllMended, kTimesRunOut, kPeerEnds };
  struct Made {
    bool one_way = false;
    int ends = 0;
    absl::Status status;
  };

  void SetUp() override {
    const char* given = std::getenv("ATOLL_FAULT_SEED");
    const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
    std::fprintf(stderr, "ATOLL_FAULT_SEED=%llu\n", static_cast<unsigned long long>(seed));
    random_.seed(seed);
  }
  int Below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }

  Agent& StartFaulty(const std::string& name, FaultPlan plan, absl::Duration reconnect_limit) {
    wrap_ = [this, plan](std::shared_ptr<transport::Endpoint> inner) mutable {
      plan.seed = random_();
      auto injector = FaultInjector::Create(std::move(inner), plan);
      injectors_.push_back(injector);
      return injector;
    };
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    options.stall_limit = absl::Milliseconds(100);
    options.reconnect_limit = reconnect_limit;
    Agent& agent = Start(name, options);
    EXPECT_TRUE(agent
                    .Register({"run"},
                              [this, name](ServerCall call) {
                                Payload reply = Body(call.request.body);
                                for (at::Tensor& tensor : call.request.tensors)
                                  reply.tensors.push_back(Copy(tensor));
                                {
                                  absl::MutexLock lock(&mu_);
                                  ++ran_[std::stoi(call.request.body)];
                                }
                                std::move(call.responder).Reply(std::move(reply));
                              })
                    .ok());
    return agent;
  }

  void Make(Agent& from, const std::string& to, int id, bool hurried) {
    constexpr int64_t kLarge = 256 << 10;  // Floats.
    const bool large = Below(6) == 0;
    auto ended = [this, id](const absl::Status& status) {
      absl::MutexLock lock(&mu_);
      --under_way_;
      ++made_[id].ends;
      made_[id].status = status;
    };
    Payload request = Body(absl::StrCat(id));
    if (large) request.tensors.push_back(Copy(at::full({kLarge}, id)));
    const bool one_way = Below(5) == 0;
    {
      auto room = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return under_way_ < 24; };
      absl::MutexLock lock(&mu_);
      ASSERT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&room), kHang)) << id;
      ++under_way_;
      made_[id].one_way = one_way;
    }
    if (one_way) {
      from.Send(to, {"run"}, std::move(request)).Then([ended](const absl::StatusOr<base::Unit>& taken) {
        ended(taken.status());
      });
      return;
    }
    CallOptions options;
    if (hurried) options.timeout = absl::Milliseconds(Below(60));
    from.Call(to, {"run"}, std::move(request), options, [ended, large, id](absl::StatusOr<Received> reply) {
      const bool whole = !reply.ok() || (reply->body == absl::StrCat(id) &&
                                         (!large || reply->tensors.at(0).equal(at::full({kLarge}, id))));
      ended(whole ? reply.status() : absl::InternalError("another answer"));
    });
  }

  void Exchange(FaultPlan plan, int count, Ends how) {
    const absl::Duration limit = how == Ends::kPeerEnds ? absl::Milliseconds(500) : absl::Seconds(60);
    Agent& a = StartFaulty("a", plan, limit);
    Agent& b = StartFaulty("b", plan, limit);
    Introduce(a, b);
    made_.resize(2 * count);
    const int last = how == Ends::kPeerEnds ? count + Below(count) : 2 * count;
    for (int id = 0; id < 2 * count; ++id) {
      if (id == last) b.endpoint()->Close();
      id % 2 == 0 ? Make(a, "b", id, how == Ends::kTimesRunOut && Below(2) == 0)
                  : Make(b, "a", id, how == Ends::kTimesRunOut && Below(2) == 0);
    }
    {
      auto all_ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return under_way_ == 0; };
      absl::MutexLock lock(&mu_);
      EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&all_ended), 2 * kHang)) << under_way_ << " left";
    }
    uint64_t faults = 0;
    for (const auto& injector : injectors_) {
      faults += injector->faults().total();
      injector->SetPlan({});  // One-way calls that were taken are run, farewells arrive.
    }
    EXPECT_GT(faults, 0u);
    Stop("a");
    Stop("b");
    absl::MutexLock lock(&mu_);
    for (int id = 0; id < 2 * count; ++id) {
      const Made& made = made_[id];
      SCOPED_TRACE(absl::StrCat("call ", id, made.one_way ? ", one way" : "", ", ran ", ran_[id],
                                " times: ", made.status.ToString()));
      EXPECT_EQ(made.ends, 1);
      EXPECT_LE(ran_[id], 1);
      if (how == Ends::kAllMended) {
        EXPECT_TRUE(made.status.ok());
      }
      if (made.status.ok()) {
        EXPECT_TRUE(ran_[id] == 1 || (made.one_way && how == Ends::kPeerEnds));
        continue;
      }
      EXPECT_TRUE(absl::IsDeadlineExceeded(made.status) || how == Ends::kPeerEnds);
      EXPECT_FALSE(GetRan(made.status) == Ran::kNo && ran_[id] != 0);
      EXPECT_FALSE(GetRan(made.status) == Ran::kYes && ran_[id] != 1);
    }
  }

  std::mt19937_64 random_;
  std::vector<std::shared_ptr<FaultInjector>> injectors_;
  absl::Mutex mu_;
  int under_way_ ABSL_GUARDED_BY(mu_) = 0;
  std::vector<Made> made_;  // Its elements: under mu_.
  std::map<int, int> ran_ ABSL_GUARDED_BY(mu_);
};
INSTANTIATE_TEST_SUITE_P(Agents, AgentFaultMixTest,
                         ::testing::Values(AgentSetup{Over::kFake, 2}, AgentSetup{Over::kReal, 1},
                                           AgentSetup{Over::kReal, 16}),
                         NameOf);

TEST_P(AgentFaultMixTest, LostMessages) { Exchange({.drop = 0.1}, 80, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, LateMessages) { Exchange({.delay = 0.1}, 80, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, RepeatedMessages) { Exchange({.repeat = 0.1}, 80, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, MessagesOutOfOrder) { Exchange({.reorder = 0.1}, 80, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, Cuts) { Exchange({.cut = 0.1}, 80, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, HalfOpenConnections) { Exchange({.half_open = 0.1}, 25, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, Stalls) { Exchange({.stall = 0.1}, 25, Ends::kAllMended); }

constexpr FaultPlan kMix = {.drop = 0.02,
                            .delay = 0.02,
                            .repeat = 0.02,
                            .reorder = 0.01,
                            .cut = 0.01,
                            .half_open = 0.01,
                            .stall = 0.01};
TEST_P(AgentFaultMixTest, AllKinds) { Exchange(kMix, 80, Ends::kAllMended); }
TEST_P(AgentFaultMixTest, AllKindsAndTimesThatRunOut) { Exchange(kMix, 80, Ends::kTimesRunOut); }
TEST_P(AgentFaultMixTest, AllKindsAndAPeerThatEnds) { Exchange(kMix, 80, Ends::kPeerEnds); }

}  // namespace
}  // namespace Atoll::rpc
