// Calls, their errors and their time: docs/scenarios/rpc.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <exception>
#include <map>
#include <stdexcept>

#include <ATen/ops/nonzero.h>
#include <ATen/ops/tensor.h>

#include "scenario_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class ScenarioCallsTest : public ScenarioTest {
 protected:
  // What worker0 is told when `to` serves `handler`.
  absl::Status ErrorOf(const std::string& to, Handler handler) {
    const std::string name = absl::StrCat("method", methods_++);
    EXPECT_TRUE(agents_[to]->Register({name}, std::move(handler)).ok());
    absl::Status status = W(0).Call(to, {name}, Body("")).Wait(kHang).status();
    EXPECT_THAT(Text(status), AllOf(HasSubstr(name), HasSubstr(agents_[to]->self().ToString())));
    return status;
  }
  int methods_ = 0;
};
INSTANTIATE_AGENT_TESTS(ScenarioCallsTest);

// Scenario rpc 2. Without waiting for any deadline: there is none.
TEST_P(ScenarioCallsTest, NobodyIsNotFoundAtOnce) {
  StartWorkers(2);
  for (const char* to : {"worker2", "5", "-1", "1.5", ""}) {
    CallOptions patient;
    patient.timeout = absl::InfiniteDuration();
    const absl::Status status = W(0).Call(to, {"echo"}, Body(""), std::move(patient)).Wait(kHang).status();
    EXPECT_TRUE(absl::IsNotFound(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
    EXPECT_THAT(Text(status), HasSubstr(absl::StrCat("on ", to, ":")));
    EXPECT_TRUE(absl::IsNotFound(AddAsync(W(0), to, at::ones({1}), 1).Wait(kHang).status()));
    EXPECT_TRUE(absl::IsNotFound(W(0).Send(to, {"echo"}, Body("")).Wait(kHang).status()));
  }
  // A number is no name: that does not even compile.
  static_assert(!std::is_convertible_v<double, absl::string_view>);
  static_assert(!std::is_convertible_v<double, base::Rank>);
}

// Scenario rpc 6. A status keeps its code; an exception is told by its type.
TEST_P(ScenarioCallsTest, AnErrorKeepsItsKindAndNamesTheCallee) {
  StartWorkers(2);
  for (const char* to : {"worker1", "worker0"}) {
    const absl::Status told = ErrorOf(to, [](ServerCall call) {
      std::move(call.responder).Reply(absl::InvalidArgumentError("Expected error"));
    });
    EXPECT_TRUE(absl::IsInvalidArgument(told)) << told;
    EXPECT_THAT(Text(told), HasSubstr("Expected error"));
    EXPECT_EQ(GetRan(told), Ran::kYes);
    const absl::Status thrown =
        ErrorOf(to, [](ServerCall) { throw std::invalid_argument("Expected error"); });
    EXPECT_TRUE(absl::IsInternal(thrown)) << thrown;
    EXPECT_THAT(Text(thrown), HasSubstr("the handler threw std::invalid_argument: Expected error"));
    EXPECT_EQ(GetRan(thrown), Ran::kYes);
  }
}

// Of a type that only its thrower can make.
class Peculiar : public std::exception {
 public:
  Peculiar(int code, const std::string& where, double when)
      : text_(absl::StrCat("code ", code, " at ", where, " after ", when)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Scenario rpc 7.
TEST_P(ScenarioCallsTest, AnExceptionOfAnyTypeArrivesWithItsTypeAndText) {
  StartWorkers(2);
  for (const char* to : {"worker1", "worker0"}) {
    const absl::Status status = ErrorOf(to, [](ServerCall) { throw Peculiar(7, "the end", 1.5); });
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("Peculiar: code 7 at the end after 1.5")));
  }
}

// Scenario rpc 9.
TEST_P(ScenarioCallsTest, ADeadlineSaysHowLongItWas) {
  StartWorkers(2);
  for (Agent* agent : workers_) ServePark(*agent);
  for (const char* to : {"worker1", "worker0"}) {
    CallOptions options;
    options.timeout = absl::Milliseconds(100);
    const absl::Status status = W(0).Call(to, {"park"}, Body(""), std::move(options)).Wait(kHang).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(Text(status), HasSubstr("no answer within 100ms"));
    EXPECT_NE(GetRan(status), Ran::kYes);
  }
}

// Scenario rpc 10. Ours: no limit is InfiniteDuration; a limit of nothing, or less, is over at once.
TEST_P(ScenarioCallsTest, NoLimitIsNoneAndALimitOfNothingIsOver) {
  AgentOptions options;
  options.worker_threads = GetParam().threads;
  options.clock = &clock_;
  StartWorkers(2, options);
  for (Agent* agent : workers_) ServePark(*agent);
  int parked = 0;
  for (const char* to : {"worker1", "worker0"}) {
    CallOptions patient;
    patient.timeout = absl::InfiniteDuration();
    auto no_limit = W(0).Call(to, {"park"}, Body(""), std::move(patient));
    auto usual = W(0).Call(to, {"park"}, Body(""));
    ASSERT_TRUE(parked_.Await(parked += 2));
    clock_.Advance(absl::Hours(1000));
    EXPECT_TRUE(absl::IsDeadlineExceeded(usual.Wait(kHang).status()));
    EXPECT_FALSE(no_limit.ready());
    for (Responder& responder : parked_.Take()) {
      Payload reply;
      reply.tensors.push_back(Copy(at::ones({1})));
      std::move(responder).Reply(std::move(reply));
    }
    absl::StatusOr<Received> reply = no_limit.Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_TRUE(reply->tensors[0].equal(at::ones({1})));
    for (absl::Duration nothing : {absl::ZeroDuration(), -absl::Seconds(1), -absl::InfiniteDuration()}) {
      CallOptions over;
      over.timeout = nothing;
      const absl::Status status = W(0).Call(to, {"echo"}, Body(""), std::move(over)).Wait(kHang).status();
      EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    }
  }
}

// Scenario rpc 17. A handler answers through its responder, whatever else it does: one that loses it is told of.
TEST_P(ScenarioCallsTest, AHandlerThatNeitherAnswersNorKeepsTheCallIsAnError) {
  StartWorkers(2);
  for (const char* to : {"worker1", "worker0"}) {
    absl::Status status = ErrorOf(to, [](ServerCall) { at::ones({2}); });
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(Text(status), HasSubstr("the handler dropped the call"));
    // One that fails before it has anything to come later.
    status = ErrorOf(to, [](ServerCall call) {
      const Responder later = std::move(call.responder);
      throw std::runtime_error("Expected error");
    });
    EXPECT_THAT(Text(status), AllOf(HasSubstr("std::runtime_error: Expected error"),
                                    Not(HasSubstr("the handler dropped the call"))));
  }
}

// Scenario rpc 23.
TEST_P(ScenarioCallsTest, EightCallsOnFourThreadsAreTwoRounds) {
  Agent& a = Start("a");
  AgentOptions four;
  four.worker_threads = 4;
  Agent& b = Start("b", four);
  Introduce(a, b);
  absl::Mutex mu;
  int came = 0, inside = 0, most = 0, rounds = 0;
  ASSERT_TRUE(b.Register({"work"}, [&](ServerCall call) {
                 {
                   absl::MutexLock lock(&mu);
                   const int round = came++ / 4;
                   most = std::max(most, ++inside);
                   auto over = [&] { return rounds > round; };
                   mu.AwaitWithTimeout(absl::Condition(&over), kHang);
                   --inside;
                 }
                 std::move(call.responder).Reply(Body(""));
               }).ok());
  std::vector<base::Future<Received>> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(a.Call("b", {"work"}, Body("")));
  auto answered = [&] {
    return std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call.ready(); });
  };
  for (int round = 1; round <= 2; ++round) {
    {
      absl::MutexLock lock(&mu);
      auto all_in = [&] { return came == 4 * round && inside == 4; };
      ASSERT_TRUE(mu.AwaitWithTimeout(absl::Condition(&all_in), kHang)) << came << " came";
      ++rounds;
    }
    // The next four are in all of its threads meanwhile: an answer needs none.
    EXPECT_TRUE(Eventually([&] { return answered() == 4 * round; })) << answered();
  }
  for (auto& call : calls) EXPECT_TRUE(call.Wait(kHang).ok());
  absl::MutexLock lock(&mu);
  EXPECT_EQ(most, 4);
}

// Scenario rpc 27.
TEST_P(ScenarioCallsTest, TenCallsOfDifferentShapesEachGetTheirOwnAnswer) {
  StartWorkers(2);
  for (const char* to : {"worker1", "worker0"}) {
    std::vector<at::Tensor> given;
    std::vector<base::Future<Values>> sums, places;
    for (int i = 0; i < 10; ++i) {
      given.push_back(at::arange((i + 1) * (i + 2), at::kFloat).view({i + 1, i + 2}).remainder(3));
      sums.push_back(AddAsync(W(0), to, given.back(), given.back()));
      places.push_back(CallOperator(&W(0), to, {"aten::nonzero", {given.back()}}));
    }
    for (size_t i = 0; i < 10; ++i) {
      EXPECT_TRUE(TensorOf(sums[i].Wait(kHang)).equal(given[i].add(given[i])));
      EXPECT_TRUE(TensorOf(places[i].Wait(kHang)).equal(at::nonzero(given[i])));
    }
  }
}

// Scenario rpc 33.
TEST_P(ScenarioCallsTest, CallsOfCallsWithoutWaiting) {
  StartWorkers(3);
  // Answers with the number of hops below it; each hop goes to the other of worker1 and worker2.
  for (int rank : {1, 2}) {
    Agent* self = &W(rank);
    ASSERT_TRUE(
        self->Register({"down"},
                       [self, other = NameOfWorker(3 - rank)](ServerCall call) {
                         const int depth = std::stoi(call.request.body);
                         if (depth == 0) return std::move(call.responder).Reply(Body("0"));
                         self->Call(
                             other, {"down"}, Body(absl::StrCat(depth - 1)), {},
                             [responder = std::move(call.responder)](absl::StatusOr<Received> below) mutable {
                               if (below.ok()) below->body = absl::StrCat(std::stoi(below->body) + 1);
                               std::move(responder).Reply(
                                   below.ok() ? Body(below->body) : absl::StatusOr<Payload>(below.status()));
                             });
                       })
            .ok());
  }
  ServeValues("add.elsewhere", [this](const ServerCall&, Values values) {
    return AddAsync(W(1), "worker2", values[0], values[1]).Wait(kHang);
  });
  EXPECT_TRUE(TensorOf(CallValues(&W(0), "worker1", {"add.elsewhere"}, {at::ones({2, 2}), 1}).Wait(kHang))
                  .equal(at::full({2, 2}, 2.0f)));
  absl::StatusOr<Received> depth = W(0).Call("worker1", {"down"}, Body("20")).Wait(kHang);
  ASSERT_TRUE(depth.ok()) << depth.status();
  EXPECT_EQ(depth->body, "20");
}

// Notes how much time each call that comes has.
class Deadlines : public Interceptor {
 public:
  explicit Deadlines(const base::Clock* clock) : clock_(clock) {}
  absl::Status OnServe(ServerCall& call) override {
    absl::MutexLock lock(&mu_);
    had_[call.method.name] = call.deadline - clock_->Now();
    return absl::OkStatus();
  }
  absl::Duration Of(const std::string& method) {
    absl::MutexLock lock(&mu_);
    return had_[method];
  }

 private:
  const base::Clock* const clock_;
  absl::Mutex mu_;
  std::map<std::string, absl::Duration> had_ ABSL_GUARDED_BY(mu_);
};

// Scenario rpc 43.
TEST_P(ScenarioCallsTest, CallsWithoutALimitHaveTheAgentsOwn) {
  EXPECT_EQ(AgentOptions().call_timeout, absl::Seconds(60));
  for (absl::Duration timeout : {absl::Seconds(60), absl::Seconds(7)}) {
    AgentOptions options;
    options.worker_threads = GetParam().threads;
    options.clock = &clock_;
    options.call_timeout = timeout;
    StartWorkers(3, options);
    auto seen = std::make_shared<Deadlines>(&clock_);
    for (Agent* agent : workers_) {
      agent->AddInterceptor(seen);
      ServeEcho(*agent);
    }
    ServeValues("nested", [this](const ServerCall&, const Values&) -> absl::StatusOr<Values> {
      absl::StatusOr<Received> inner = W(1).Call("worker2", {"echo"}, Body("")).Wait(kHang);
      if (!inner.ok()) return inner.status();
      return Values();
    });
    for (const char* to : {"worker1", "worker0"}) {
      CallOptions own;
      own.timeout = absl::Seconds(3);
      ASSERT_TRUE(W(0).Call(to, {"echo"}, Body(""), std::move(own)).Wait(kHang).ok());
      EXPECT_EQ(seen->Of("echo"), absl::Seconds(3));
      ASSERT_TRUE(W(0).Call(to, {"echo"}, Body("")).Wait(kHang).ok());
      EXPECT_EQ(seen->Of("echo"), timeout);
      EXPECT_TRUE(Add(W(0), to, at::ones({1}), 1).equal(at::full({1}, 2.0f)));
      EXPECT_EQ(seen->Of("torch.operator"), timeout);
    }
    CallOptions brief;
    brief.timeout = absl::Seconds(2);
    ASSERT_TRUE(CallValues(&W(0), "worker1", {"nested"}, {}, std::move(brief)).Wait(kHang).ok());
    EXPECT_EQ(seen->Of("nested"), absl::Seconds(2));
    EXPECT_EQ(seen->Of("echo"), timeout);
    for (Agent* agent : std::exchange(workers_, {})) Stop(agent->self().name);
  }
}

// Scenario rpc 44.
TEST_P(ScenarioCallsTest, APeerThatDiedSinceItWasReachedIsUnavailable) {
  StartWorkers(2);
  ServeEcho(W(1));
  ServePark(W(1));
  ASSERT_TRUE(W(0).Call("worker1", {"echo"}, Body("")).Wait(kHang).ok());
  W(1).endpoint()->Close();  // Without a farewell; and nobody has noticed yet: the call may still get there.
  CallOptions patient;
  patient.timeout = absl::InfiniteDuration();
  const absl::Status status =
      W(0).Call("worker1", {"park"}, Body(""), std::move(patient)).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr(absl::StrCat("park v1 on ", W(1).self().ToString())));
  EXPECT_NE(GetRan(status), Ran::kYes);
}

// What is no function is told of, or told nobody; it ends nothing.
TEST_P(ScenarioCallsTest, AHandlerOrCallbackThatIsNone) {
  StartWorkers(2);
  EXPECT_TRUE(absl::IsInvalidArgument(W(1).Register({"none"}, nullptr)));
  ServeEcho(W(0));
  ServeEcho(W(1));
  for (const char* to : {"worker1", "worker0", "nobody"}) {
    for (bool again : {false, true}) {
      CallOptions options;
      if (again) options.retry = RetryPolicy{2};
      W(0).Call(to, {"echo"}, Body(""), options, nullptr);
      options.reply_inline = true;
      W(0).Call(to, {"echo"}, Body(""), options, nullptr);
    }
  }
  EXPECT_TRUE(W(0).Call("worker1", {"echo"}, Body("")).Wait(kHang).ok());
  EXPECT_TRUE(W(0).Shutdown(kHang).ok());
}

}  // namespace
}  // namespace Atoll::rpc
