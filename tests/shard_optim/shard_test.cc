#include "atoll/shard_optim/shard.h"

#include <ATen/EmptyTensor.h>

#include <cmath>

#include "atoll/shard_optim/adam.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shard_harness.h"

namespace Atoll::shard_optim {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

std::string Message(const Answer& answer) { return std::string(answer.status().message()); }

// ---- Attach ---------------------------------------------------------------------------------------------

TEST(ShardTest, AttachNamesTheFirstDifference) {
  Harness harness({VectorSpec("a", 3), VectorSpec("b", 4)}, {.owners = 2, .workers = 2});
  Attach attach;
  attach.worker = 1;
  attach.arguments = harness.Arguments(0);
  attach.arguments.parameters[1] = VectorSpec("b", 5);
  Answer answer = harness.Call(0, 1, attach);
  EXPECT_EQ(answer.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(Message(answer), HasSubstr("parameter 1 'b': sizes [4] here, [5] there"));
  attach.arguments = harness.Arguments(0);
  attach.arguments.layout.chunk_bytes = 8192;
  EXPECT_THAT(Message(harness.Call(0, 1, attach)), HasSubstr("chunk_bytes 4194304 here, 8192 there"));
  attach.arguments = harness.Arguments(0);
  attach.arguments.policy = Async{};
  EXPECT_THAT(Message(harness.Call(0, 1, attach)),
              HasSubstr("policy sync, round limit 1m here, async there"));
  attach.arguments = harness.Arguments(1);
  EXPECT_THAT(Message(harness.Call(0, 1, attach)), HasSubstr("owner index 0 here, 1 there"));
}

TEST(ShardTest, AttachWaitsForAllAndTellsWhoLoads) {
  Harness harness({VectorSpec("a", 3)}, {.workers = 2});
  Answer first = harness.AttachTo(0, 1);
  EXPECT_FALSE(first.there());
  Answer again = harness.AttachTo(0, 1);
  EXPECT_EQ(first.status().code(), Code::kAborted);
  Answer second = harness.AttachTo(0, 0);
  EXPECT_FALSE(again.as<Attach::Reply>().load);
  EXPECT_TRUE(second.as<Attach::Reply>().load);
  EXPECT_EQ(second.as<Attach::Reply>().next_step, 1);
  EXPECT_TRUE(second.as<Attach::Reply>().joined && again.as<Attach::Reply>().joined);
}

TEST(ShardTest, AttachTellsWhoIsMissingBeforeItsDeadline) {
  base::RealClock clock;
  base::Timer timer(&clock);
  Harness harness({VectorSpec("a", 3)}, {.workers = 3, .timer = &timer, .clock = &clock});
  Attach attach;
  attach.worker = 1;
  attach.arguments = harness.Arguments(0);
  Answer answer = harness.Call(0, 1, attach, {}, clock.Now() + absl::Milliseconds(20));
  answer.Wait();
  EXPECT_EQ(answer.status().code(), Code::kDeadlineExceeded);
  EXPECT_THAT(Message(answer), HasSubstr("missing worker 0, worker 2"));
}

TEST(ShardTest, AnOwnerOfNothingServes) {
  Harness harness({VectorSpec("a", 3)}, {.owners = 2});
  harness.Begin(Fill(harness.parameters, 1));
  int empty = harness.layout().owners()[0].chunk_count == 0 ? 0 : 1;
  Info::Reply info = harness.Call(empty, 0, Info{}).as<Info::Reply>();
  EXPECT_EQ(info.elements, 0);
  EXPECT_TRUE(info.loaded);
  EXPECT_TRUE(harness.Call(empty, 0, OpenLanding{1}).status().ok());
  EXPECT_TRUE(harness.Call(empty, 0, Leave{1}).status().ok());
}

TEST(ShardTest, RefusesWhatComesTooEarlyOrFromStrangers) {
  Harness harness({VectorSpec("a", 3)}, {.workers = 2});
  EXPECT_THAT(Message(harness.Push(0, 1, 0, {{1, 1, 1}})), HasSubstr("not attached"));
  EXPECT_EQ(harness.Call(0, 0, Join{1}).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(harness.Call(0, 0, Leave{1}).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(harness.Call(0, 0, OpenLanding{1}).status().code(), Code::kFailedPrecondition);
  EXPECT_EQ(harness.Call(0, 0, Load{0}).status().code(), Code::kFailedPrecondition);
  harness.AttachTo(0, 0);
  harness.AttachTo(0, 1);
  EXPECT_THAT(Message(harness.Push(0, 1, 0, {{1, 1, 1}})), HasSubstr("still misses the values of 1 chunks"));
  at::Tensor tensor = at::detail::empty_cpu({3}, at::TensorOptions().dtype(at::kFloat));
  EXPECT_THAT(Message(harness.Call(0, 1, Load{0}, {tensor})), HasSubstr("worker 0's"));
  Answer pull = harness.Call(0, 1, Pull{0, 0});
  EXPECT_FALSE(pull.there());  // Deferred until the values are there.
  EXPECT_TRUE(harness.Call(0, 0, Load{0}, {tensor}).status().ok());
  EXPECT_TRUE(pull.status().ok());
  EXPECT_EQ(harness.Call(0, 0, Load{0}, {tensor}).status().code(), Code::kAlreadyExists);
}

TEST(ShardTest, MalformedCallsAreRefusedWithWhatWouldBeRight) {
  Small harness({.owners = 2});
  const int chunk = 0, owner = harness.OwnerOf(chunk);
  const int64_t elements = harness.layout().chunks()[chunk].elements();
  at::Tensor right = at::detail::empty_cpu({elements}, at::TensorOptions().dtype(at::kFloat));
  at::Tensor wrong = at::detail::empty_cpu({elements + 1}, at::TensorOptions().dtype(at::kFloat));
  at::Tensor doubles = at::detail::empty_cpu({elements}, at::TensorOptions().dtype(at::kDouble));
  PushGradient push{1, chunk, {}, AllDefined(harness.layout().chunks()[chunk].segments.size())};
  for (auto& tensors : std::vector<std::vector<at::Tensor>>{{}, {wrong}, {doubles}, {right, right}}) {
    Answer answer = harness.Call(owner, 0, push, tensors);
    EXPECT_EQ(answer.status().code(), Code::kInvalidArgument);
    EXPECT_THAT(Message(answer), HasSubstr(absl::StrCat("one float tensor of ", elements)));
  }
  push.defined = "\xff\xff";
  EXPECT_THAT(Message(harness.Call(owner, 0, push, {right})), HasSubstr("bitmap"));
  push.defined = "";
  EXPECT_THAT(Message(harness.Call(owner, 0, push, {right})), HasSubstr("bitmap"));
  push.defined = AllDefined(harness.layout().chunks()[chunk].segments.size());
  push.optimizer.beta1 = 2;
  EXPECT_THAT(Message(harness.Call(owner, 0, push, {right})), HasSubstr("beta1"));
  push.optimizer = {};
  EXPECT_THAT(Message(harness.Call(1 - owner, 0, push, {right})), HasSubstr("it is owner"));
  push.chunk = 99;
  EXPECT_THAT(Message(harness.Call(owner, 0, push, {right})), HasSubstr("there are"));
  push.chunk = -1;
  EXPECT_EQ(harness.Call(owner, 0, push, {right}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(harness.CallRaw(owner, 0, {"pull", 2}, "", {}, absl::InfiniteFuture()).status().code(),
            Code::kNotFound);
  EXPECT_EQ(harness.CallRaw(owner, 0, {"pull", 1}, "x", {}, absl::InfiniteFuture()).status().code(),
            Code::kInvalidArgument);
}

// ---- A step ---------------------------------------------------------------------------------------------

TEST(ShardTest, TheReplyWaitsForTheRoundAndForTheLanding) {
  Small harness({.workers = 2});
  Answer zero = harness.Push(0, 1, 0, harness.Gradient(2));
  harness.Land(0, 1);
  EXPECT_FALSE(zero.there());  // Applied comes first.
  Answer one = harness.Push(1, 1, 0, harness.Gradient(4));
  EXPECT_TRUE(zero.there());
  EXPECT_FALSE(one.there());  // Its landing is shut.
  harness.Land(1, 1);
  ASSERT_TRUE(one.there());
  EXPECT_EQ(zero.values()[0], one.values()[0]);
  EXPECT_LT(zero.values()[0], 1);
  EXPECT_EQ(one.as<PushGradient::Reply>().contributors, 2);
}

TEST(ShardTest, RepeatedLateAndFuturePushesAreAppliedOnceOrRefused) {
  Small harness({.workers = 2});
  harness.Land(0, 1);
  harness.Land(1, 1);
  Answer first = harness.Push(0, 1, 0, harness.Gradient(2));
  Answer repeat = harness.Push(0, 1, 0, harness.Gradient(100));  // Its content does not matter.
  EXPECT_EQ(first.status().code(), Code::kAborted);
  EXPECT_FALSE(repeat.there());
  Answer other = harness.Push(1, 1, 0, harness.Gradient(2));
  ASSERT_TRUE(repeat.status().ok() && other.status().ok());
  std::vector<float> value = other.values();
  Answer late = harness.Push(0, 1, 0, harness.Gradient(7));  // Applied before: the current value.
  ASSERT_TRUE(late.status().ok());
  EXPECT_EQ(late.values(), value);
  EXPECT_THAT(Message(harness.Push(0, 3 + 1, 0, harness.Gradient(1))), HasSubstr("step 4 is in the future"));
  EXPECT_THAT(Message(harness.Push(0, 0, 0, harness.Gradient(1))), HasSubstr("steps count from 1"));
  EXPECT_EQ(harness.Call(0, 0, Info{}).as<Info::Reply>().steps, 1);
  EXPECT_EQ(harness.PullAll(1)[0][0], value[0]);
}

TEST(ShardTest, HyperParametersMustAgree) {
  Small harness({.workers = 2});
  harness.Push(0, 1, 0, harness.Gradient(1));
  harness.optimizer.lr = 0.5;
  Answer answer = harness.Push(1, 1, 0, harness.Gradient(1));
  EXPECT_EQ(answer.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(Message(answer), HasSubstr("were set by worker 0; worker 1's differ"));
  EXPECT_THAT(Message(answer), HasSubstr("lr=0.5"));
}

// Scenario batch_rpc 7.
TEST(ShardTest, UndefinedOnAllLeavesUntouchedAndOnSomeIsZero) {
  Small harness({.workers = 2});
  harness.Land(0, 9);
  harness.Land(1, 9);
  Values gradient = harness.Gradient(2);
  harness.Push(0, 1, 0, gradient, {true, false}).there();
  Answer answer = harness.Push(1, 1, 0, gradient, {false, false});  // Sends no tensor at all.
  ASSERT_TRUE(answer.status().ok());
  answer.Release();
  Values values = harness.PullAll(1);
  EXPECT_EQ(values[1][0], 1.0f);
  EXPECT_LT(values[0][0], 1.0f);
  const ChunkStore& store = harness.shards[0]->StoreForTest();
  EXPECT_EQ(store.SegmentStepForTest(0, 0), 1);
  EXPECT_EQ(store.SegmentStepForTest(0, 1), 0);
  EXPECT_FLOAT_EQ(store.ExpAvgForTest(0, 0)[0], 0.1f * 1.0f);  // The mean of 2 and a zero.
  harness.Push(0, 2, 0, gradient, {false, false});
  harness.Push(1, 2, 0, gradient, {false, false});
  EXPECT_EQ(harness.PullAll(2), values);
  EXPECT_EQ(store.SegmentStepForTest(0, 0), 1);
}

// Scenario batch_rpc 6.
TEST(ShardTest, ManyContributionsFoldToTheSameBitsAsAllAtOnce) {
  const int workers = 7;
  std::vector<ParameterSpec> specs = {VectorSpec("a", 1003), VectorSpec("b", 77)};
  Harness harness(specs, {.workers = workers});
  harness.Begin(Fill(specs, 1));
  auto gradient = [&](int worker) {
    Values values = Fill(specs, 0);
    for (auto& parameter : values) {
      for (size_t i = 0; i < parameter.size(); ++i)
        parameter[i] = std::sin(static_cast<float>(i * 7 + worker * 1000)) * 1e3f;
    }
    return values;
  };
  auto defined = [](int worker) { return std::vector<bool>{worker != 0 && worker != 5, worker > 2}; };
  for (int worker = workers - 1; worker >= 0; --worker)
    harness.Push(worker, 1, 0, gradient(worker), defined(worker));
  Values end = harness.PullAll(1);
  for (size_t p = 0; p < specs.size(); ++p) {
    const size_t n = specs[p].numel();
    std::vector<float> sum(n), value(n, 1), m(n), v(n);
    for (int worker = 0; worker < workers; ++worker) {
      Values g = gradient(worker);
      for (size_t i = 0; i < n; ++i) sum[i] += defined(worker)[p] ? g[p][i] : 0.0f;
    }
    const float* sums[] = {sum.data()};
    AdamSlice slice{value.data(),
                    value.data(),
                    m.data(),
                    v.data(),
                    sums,
                    workers,
                    true,
                    static_cast<int64_t>(n),
                    static_cast<int64_t>(n % 8)};
    AdamPass({}, 1, slice);
    EXPECT_EQ(end[p], value) << "parameter " << p;
  }
}

// ---- Deaths, restarts, limits ---------------------------------------------------------------------------

// Scenario batch_rpc 13.
TEST(ShardTest, AKilledWorkersRoundCompletesFromTheRest) {
  Harness harness({VectorSpec("a", 100000), VectorSpec("b", 100000)}, {.workers = 3});
  Values gradient = Fill(harness.parameters, 1);
  harness.Begin(Fill(harness.parameters, 1));
  ASSERT_EQ(harness.layout().chunks().size(), 2u);
  harness.Land(1, 1);
  harness.Land(2, 1);
  Answer dead = harness.Push(0, 1, 0, gradient);
  std::vector<Answer> answers;
  for (int worker : {1, 2}) {
    for (int chunk : {0, 1}) answers.push_back(harness.Push(worker, 1, chunk, gradient));
  }
  EXPECT_TRUE(answers[0].there());
  EXPECT_FALSE(answers[1].there());
  harness.Die(0);
  EXPECT_EQ(dead.status().code(), Code::kUnavailable);
  for (Answer& answer : answers) ASSERT_TRUE(answer.status().ok());
  EXPECT_EQ(answers[0].as<PushGradient::Reply>().contributors, 3);
  EXPECT_EQ(answers[1].as<PushGradient::Reply>().contributors, 2);
  EXPECT_EQ(harness.Call(0, 1, Info{}).as<Info::Reply>().workers, 2);
}

TEST(ShardTest, ARestartedWorkerJoinsTheNextRoundWithItsValues) {
  Small harness({.owners = 2, .workers = 2});
  const int chunks = static_cast<int>(harness.layout().chunks().size());
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int worker : {0, 1}) harness.Push(worker, 1, chunk, harness.Gradient(1));
  }
  harness.Restart(0);  // The old life was not seen to end.
  int64_t from = 0;
  for (int owner : {0, 1}) {
    Attach::Reply attached = harness.AttachTo(owner, 0).as<Attach::Reply>();
    EXPECT_FALSE(attached.joined || attached.load);
    from = std::max(from, attached.next_step);
  }
  EXPECT_EQ(from, 2);
  harness.Push(1, 2, 0, harness.Gradient(1));  // On the first chunk's owner round 2 begins, and ends.
  bool refused = false;
  for (int owner : {0, 1}) {
    Join::Reply joined = harness.Call(owner, 0, Join{from}).as<Join::Reply>();
    refused |= !joined.accepted;
    from = std::max(from, joined.next_step);
  }
  EXPECT_TRUE(refused);
  EXPECT_EQ(from, 3);
  for (int owner : {0, 1}) EXPECT_TRUE(harness.Call(owner, 0, Join{from}).as<Join::Reply>().accepted);
  std::vector<Answer> pulls;
  for (int chunk = 0; chunk < chunks; ++chunk)
    pulls.push_back(harness.Call(harness.OwnerOf(chunk), 0, Pull{chunk, 2}));
  EXPECT_FALSE(pulls.back().there());  // Step 2 is not done there.
  for (int chunk = 1; chunk < chunks; ++chunk) harness.Push(1, 2, chunk, harness.Gradient(1));
  for (Answer& pull : pulls) {
    ASSERT_TRUE(pull.there());
    EXPECT_EQ(pull.as<Pull::Reply>().step, 2);
  }
  harness.Land(0, 3);
  Answer mine = harness.Push(0, 3, 0, harness.Gradient(1));
  EXPECT_FALSE(mine.there());
  harness.Push(1, 3, 0, harness.Gradient(1));
  EXPECT_EQ(mine.as<PushGradient::Reply>().contributors, 2);
}

// Scenario batch_rpc 13.
TEST(ShardTest, TheRoundsLimitEndsItWithNames) {
  Small harness({.workers = 2, .policy = Sync{absl::Seconds(5)}});
  Answer answer = harness.Push(0, 1, 0, harness.Gradient(1));
  harness.shards[0]->TickForTest();
  EXPECT_FALSE(answer.there());
  harness.fake_clock.Advance(absl::Seconds(5));
  harness.shards[0]->TickForTest();
  EXPECT_EQ(answer.status().code(), Code::kDeadlineExceeded);
  EXPECT_THAT(Message(answer),
              HasSubstr("round 1 did not complete within 5s: no gradient from worker 1 (worker1#"));
  harness.Land(0, 1);
  answer = harness.Push(0, 1, 0, harness.Gradient(1));
  harness.Push(1, 1, 0, harness.Gradient(1));
  EXPECT_EQ(answer.as<PushGradient::Reply>().contributors, 2);
}

TEST(ShardTest, PullsThatWereGivenUpMakeRoom) {
  Small harness({.workers = 2});
  const absl::Time deadline = harness.fake_clock.Now() + absl::Seconds(5);
  std::vector<Answer> given_up;
  for (int i = 0; i < 4096; ++i) given_up.push_back(harness.Call(0, 0, Pull{0, 1}, {}, deadline));
  EXPECT_EQ(harness.Call(0, 1, Pull{0, 1}, {}, deadline).status().code(), Code::kResourceExhausted);
  harness.fake_clock.Advance(absl::Seconds(5));
  Answer pull = harness.Call(0, 1, Pull{0, 1});
  EXPECT_EQ(given_up.back().status().code(), Code::kDeadlineExceeded);
  for (int worker : {0, 1}) harness.Push(worker, 1, 0, harness.Gradient(1));
  ASSERT_TRUE(pull.there());
  EXPECT_EQ(pull.as<Pull::Reply>().step, 1);
}

TEST(ShardTest, TheRoundsLimitFiresByItself) {
  base::RealClock clock;
  base::Timer timer(&clock);
  base::ThreadPool pool({.name = "shard", .threads = 1});
  Small harness({.workers = 2,
                 .policy = Sync{absl::Milliseconds(20)},
                 .executor = &pool,
                 .timer = &timer,
                 .clock = &clock});
  Answer answer = harness.Push(0, 1, 0, harness.Gradient(1));
  answer.Wait();
  EXPECT_EQ(answer.status().code(), Code::kDeadlineExceeded);
}

TEST(ShardTest, DestructionAnswersWhoWaits) {
  auto harness = std::make_unique<Small>(HarnessOptions{.workers = 2});
  Answer push = harness->Push(0, 1, 0, harness->Gradient(1));
  Answer pull = harness->Call(0, 0, Pull{0, 1});
  harness.reset();
  EXPECT_EQ(push.status().code(), Code::kUnavailable);
  EXPECT_EQ(pull.status().code(), Code::kUnavailable);
}

}  // namespace
}  // namespace Atoll::shard_optim
