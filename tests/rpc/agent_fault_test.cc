// What a session mends: calls over pipes that lose, delay, repeat and reorder messages, end, or fall silent. Every
// call is answered, and runs once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"
#include "atoll/rpc/agent.h"
#include "atoll/transport/fault_injector.h"

namespace Atoll::rpc {
namespace {

using transport::FaultInjector;
using transport::FaultPlan;

class AgentFaultTest : public AgentTest {
 protected:
  // Agents that are started from now on have faults of `plan` on what they write.
  void Inject(FaultPlan plan) {
    wrap_ = [this, plan](std::shared_ptr<transport::Endpoint> inner) mutable {
      plan.seed += 7;
      auto injector = FaultInjector::Create(std::move(inner), plan);
      injectors_.push_back(injector);
      return injector;
    };
  }
  uint64_t Faults() const {
    uint64_t total = 0;
    for (const auto& injector : injectors_) total += injector->faults().total();
    return total;
  }
  AgentOptions Options() const {
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    options.stall_limit = absl::Milliseconds(150);
    return options;
  }

  // `count` calls that add one, small and large, some one way, at most `at_once` under way; then all have run once.
  void AddOnes(int count, int at_once) {
    Agent& a = Start("a", Options());
    Agent& b = Start("b", Options());
    Introduce(a, b);
    absl::Mutex mu;
    std::multiset<int> added;
    ASSERT_TRUE(b.Register({"add"}, [&](ServerCall call) {
                   Payload reply = Body(call.request.body);
                   for (at::Tensor& tensor : call.request.tensors) reply.tensors.push_back(Copy(tensor));
                   {
                     absl::MutexLock lock(&mu);
                     added.insert(std::stoi(call.request.body));
                   }
                   std::move(call.responder).Reply(std::move(reply));
                 }).ok());
    int under_way = 0;
    std::vector<absl::Status> failures;
    std::vector<int> ends(count, 0);
    for (int i = 0; i < count; ++i) {
      auto ended = [&, i](const absl::Status& status) {
        absl::MutexLock lock(&mu);
        --under_way;
        ++ends[i];
        if (!status.ok()) failures.push_back(status);
      };
      {
        auto room = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu) { return under_way < at_once; };
        absl::MutexLock lock(&mu);
        ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&room), kHang)) << i;
        ++under_way;
      }
      Payload request = Body(absl::StrCat(i));
      if (i % 8 == 3) request.tensors.push_back(Copy(at::full({30000}, i)));  // Of the bulk lane.
      if (i % 5 == 4) {
        a.Send("b", {"add"}, std::move(request)).Then([ended](const absl::StatusOr<base::Unit>& taken) {
          ended(taken.status());
        });
        continue;
      }
      a.Call("b", {"add"}, std::move(request), {}, [ended, i](absl::StatusOr<Received> reply) {
        const bool whole = !reply.ok() || (reply->body == absl::StrCat(i) &&
                                           (i % 8 != 3 || reply->tensors.at(0).equal(at::full({30000}, i))));
        ended(whole ? reply.status() : absl::InternalError("another answer"));
      });
    }
    auto all_ended = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu) {
      return under_way == 0 && added.size() == static_cast<size_t>(count);
    };
    {
      absl::MutexLock lock(&mu);
      EXPECT_TRUE(mu.AwaitWithTimeout(absl::Condition(&all_ended), kHang))
          << under_way << " " << added.size();
      EXPECT_TRUE(failures.empty()) << failures.size() << " failed; the first: " << failures.front();
      for (int i = 0; i < count; ++i) {
        EXPECT_EQ(ends[i], 1) << i;
        EXPECT_EQ(added.count(i), 1u) << i;
      }
    }
    EXPECT_GT(Faults(), 0u);
    Stop("a");
    Stop("b");
  }

  std::vector<std::shared_ptr<FaultInjector>> injectors_;
};
INSTANTIATE_AGENT_TESTS(AgentFaultTest);

// Scenario users 29.
TEST_P(AgentFaultTest, LostMessagesComeAgain) {
  Inject({.drop = 0.1});
  AddOnes(300, 16);
}
TEST_P(AgentFaultTest, LateMessagesCome) {
  Inject({.delay = 0.1});
  AddOnes(300, 16);
}
TEST_P(AgentFaultTest, RepeatedMessagesCountOnce) {
  Inject({.repeat = 0.1});
  AddOnes(300, 16);
}
TEST_P(AgentFaultTest, ReorderedMessagesAreSortedOut) {
  Inject({.reorder = 0.1});
  AddOnes(300, 16);
}
TEST_P(AgentFaultTest, CutConnectionsAreMadeAgain) {
  Inject({.cut = 0.1});
  AddOnes(300, 16);
}
TEST_P(AgentFaultTest, ConnectionsThatFallSilentAreMadeAgain) {
  Inject({.half_open = 0.02});
  AddOnes(200, 16);
}
TEST_P(AgentFaultTest, ConnectionsThatStallGoOn) {
  Inject({.stall = 0.1, .stall_for = absl::Milliseconds(20)});
  AddOnes(200, 16);
}
// Scenario init 19.
TEST_P(AgentFaultTest, AllOfItAtOnce) {
  Inject({.drop = 0.02,
          .delay = 0.02,
          .repeat = 0.02,
          .reorder = 0.02,
          .cut = 0.02,
          .half_open = 0.01,
          .stall = 0.01,
          .stall_for = absl::Milliseconds(20)});
  AddOnes(300, 16);
}

}  // namespace
}  // namespace Atoll::rpc
