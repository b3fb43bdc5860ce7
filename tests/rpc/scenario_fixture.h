// What the scenarios of docs/scenarios share: workers of one process, "worker0" and so on, that know each other and
// serve operators. As all tests of agents they run over both transports, with 1, 2 and 16 threads each.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"
#include "atoll/rpc/operators.h"
#include "atoll/rpc/values.h"

namespace Atoll::rpc {

using Values = std::vector<c10::IValue>;

class ScenarioTest : public AgentTest {
 protected:
  static std::string NameOfWorker(int rank) { return absl::StrCat("worker", rank); }

  void StartWorkers(int count, const AgentOptions& options) {
    for (int rank = 0; rank < count; ++rank) {
      Agent& agent = Start(NameOfWorker(rank), options);
      EXPECT_TRUE(ServeOperators(&agent).ok());
      for (Agent* other : workers_) Introduce(*other, agent);
      workers_.push_back(&agent);
    }
  }
  // With threads as the setup says.
  void StartWorkers(int count) {
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    StartWorkers(count, options);
  }
  Agent& W(int rank) { return *workers_.at(static_cast<size_t>(rank)); }

  // Serves a method of values, on all workers.
  void ServeValues(const std::string& name,
                   const std::function<absl::StatusOr<Values>(const ServerCall&, Values)>& body) {
    for (Agent* agent : workers_) {
      ASSERT_TRUE(agent
                      ->Register({name},
                                 [body](ServerCall call) {
                                   auto reply = [&]() -> absl::StatusOr<Payload> {
                                     absl::StatusOr<Values> values = DecodeValues(call.request);
                                     if (values.ok()) values = body(call, *std::move(values));
                                     if (!values.ok()) return values.status();
                                     return EncodeValues(*std::move(values));
                                   };
                                   std::move(call.responder).Reply(reply());
                                 })
                      .ok());
    }
  }

  static base::Future<Values> AddAsync(Agent& from, const std::string& to, c10::IValue x, c10::IValue y) {
    Values arguments;
    arguments.push_back(std::move(x));
    arguments.push_back(std::move(y));
    return CallOperator(&from, to, {"aten::add", std::move(arguments)});
  }
  // The one tensor of a result.
  static at::Tensor TensorOf(const absl::StatusOr<Values>& result) {
    EXPECT_TRUE(result.ok()) << result.status();
    if (!result.ok() || result->size() != 1 || !(*result)[0].isTensor()) return at::full({}, -1e9);
    return (*result)[0].toTensor();
  }
  static at::Tensor Add(Agent& from, const std::string& to, c10::IValue x, c10::IValue y) {
    return TensorOf(AddAsync(from, to, std::move(x), std::move(y)).Wait(kHang));
  }
  static std::string Text(const absl::Status& status) { return std::string(status.message()); }

  // Whatever of a test's the agents look at is there until they have ended.
  void TearDown() override {
    workers_.clear();
    agents_.clear();
  }

  base::FakeClock clock_{absl::UnixEpoch() + absl::Hours(1)};  // Of those that are started with it.
  std::vector<Agent*> workers_;
};

}  // namespace Atoll::rpc
