#include "atoll/shard_optim/shard.h"

#include <ATen/EmptyTensor.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "atoll/shard_optim/adam.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shard_harness.h"

namespace Atoll::shard_optim {
namespace {

using ::testing::HasSubstr;
using Values = std::vector<std::vector<float>>;
using Code = absl::StatusCode;

std::string Message(const Answer& answer) { return std::string(answer.status().message()); }

Values Fill(const std::vector<ParameterSpec>& specs, float value) {
  Values values;
  for (const ParameterSpec& spec : specs) values.emplace_back(spec.numel(), value);
  return values;
}

// Two small parameters in one chunk, begun at 1.
struct Small : Harness {
  explicit Small(HarnessOptions options) : Harness({VectorSpec("a", 70), VectorSpec("b", 5)}, options) {
    Begin(Fill(parameters, 1));
  }
  Values Gradient(float value) const { return Fill(parameters, value); }
};

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

// ---- Memory ---------------------------------------------------------------------------------------------

TEST(ShardTest, StagingIsReusedAndBounded) {
  std::vector<ParameterSpec> specs;
  for (int i = 0; i < 4; ++i) specs.push_back(VectorSpec(absl::StrCat("p", i), 100000));
  Harness harness(specs, {.workers = 2, .staging_bytes = 900000});  // Two gradients of 400,000 bytes.
  harness.Begin(Fill(specs, 1));
  Values gradient = Fill(specs, 1);
  EXPECT_FALSE(harness.Push(1, 1, 0, gradient).there());
  EXPECT_FALSE(harness.Push(1, 1, 1, gradient).there());
  Answer refused = harness.Push(1, 1, 2, gradient);
  EXPECT_EQ(refused.status().code(), Code::kResourceExhausted);
  for (int chunk = 0; chunk < 4; ++chunk) {
    EXPECT_FALSE(harness.Push(0, 1, chunk, gradient).there()) << "the next in order is always taken";
  }
  harness.Land(1, 1);
  for (int chunk : {2, 3}) EXPECT_TRUE(harness.Push(1, 1, chunk, gradient).status().ok());
  EXPECT_EQ(harness.Call(0, 0, Info{}).as<Info::Reply>().steps, 1);
}

TEST(ShardTest, AllocateChecksBeforeAnyByteMoves) {
  Small harness({});
  Shard& shard = *harness.shards[0];
  base::MemberId me = WorkerMember(0), stranger = WorkerMember(9);
  PushGradient push{1, 0, {}, AllDefined(2)};
  rpc::TensorMeta meta;
  meta.sizes = {harness.layout().chunks()[0].elements()};
  auto code = [&](const base::MemberId& who, const rpc::MethodId& method, std::string body,
                  std::vector<rpc::TensorMeta> metas) {
    return shard.Allocate(who, method, body, metas).status().code();
  };
  EXPECT_EQ(code(me, PushGradient::Method(), push.Encode(), {meta}), Code::kOk);
  EXPECT_EQ(code(stranger, PushGradient::Method(), push.Encode(), {meta}), Code::kFailedPrecondition);
  EXPECT_EQ(code(me, PushGradient::Method(), "junk", {meta}), Code::kInvalidArgument);
  EXPECT_EQ(code(me, PushGradient::Method(), push.Encode(), {meta, meta}), Code::kInvalidArgument);
  EXPECT_EQ(code(me, Pull::Method(), Pull{}.Encode(), {meta}), Code::kInvalidArgument);
  meta.sizes = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_EQ(code(me, PushGradient::Method(), push.Encode(), {meta}), Code::kInvalidArgument);
  meta.sizes = {-1};
  EXPECT_EQ(code(me, PushGradient::Method(), push.Encode(), {meta}), Code::kInvalidArgument);
}

TEST(ShardTest, ALentValueIsNeverWritten) {
  Small harness({.policy = Async{}});
  harness.Land(0, 100);
  Answer reader = harness.Call(0, 0, Pull{0, 0});  // Holds its loan.
  std::vector<float> before = reader.values();
  const void* memory = reader.tensor().data_ptr();
  Answer pushed = harness.Push(0, 1, 0, harness.Gradient(1));
  EXPECT_EQ(reader.values(), before);
  EXPECT_NE(pushed.tensor().data_ptr(), memory);
  const void* second = pushed.tensor().data_ptr();
  reader.Release();
  pushed.Release();
  Answer again = harness.Push(0, 2, 0, harness.Gradient(1));
  EXPECT_EQ(again.tensor().data_ptr(), second) << "not lent: written in place";
}

TEST(ShardTest, WithoutASpareTheChunkWaitsForAReader) {
  Small harness({.policy = Async{}, .spare_bytes = 0});
  harness.Land(0, 100);
  std::vector<Answer> held;
  int64_t step = 0;
  // The pool has a little room by rounding; hold values until a push has to wait.
  while (held.empty() || held.back().there()) {
    ASSERT_LT(step, 100);
    held.push_back(harness.Push(0, ++step, 0, harness.Gradient(1)));
  }
  const int waiting = static_cast<int>(held.size()) - 1;
  Answer read = harness.Call(0, 0, Pull{0, 0});  // Readers get the whole older value meanwhile.
  ASSERT_TRUE(read.status().ok());
  EXPECT_EQ(read.values(), held[waiting - 1].values());
  read.Release();
  held[0].Release();
  ASSERT_TRUE(held[waiting].there());
  EXPECT_EQ(held[waiting].as<PushGradient::Reply>().step, step);
}

// ---- Async ----------------------------------------------------------------------------------------------

TEST(ShardTest, AsyncStepsEqualThePushesAndNoReaderSeesATornSlice) {
  base::ThreadPool pool({.name = "shard", .threads = 2});
  constexpr int kWorkers = 2, kSteps = 200;
  Harness harness({VectorSpec("a", 20000)}, {.workers = kWorkers, .policy = Async{}, .executor = &pool});
  harness.Begin(Fill(harness.parameters, 1));
  // All elements start equal and get equal gradients: a slice with two values is torn. The scalar tail rounds
  // otherwise; 20,000 has none.
  std::atomic<bool> stop{false};
  std::atomic<int> reads{0};
  std::thread reader([&] {
    std::vector<Answer> stalled;  // Some loans are held long.
    while (!stop.load()) {
      Answer answer = harness.Call(0, 0, Pull{0, 0});
      answer.Wait();
      stalled.push_back(answer);
      if (stalled.size() < 5) continue;
      for (const Answer& old : stalled) {
        std::vector<float> values = old.values();
        EXPECT_EQ(std::count(values.begin(), values.end(), values[0]), static_cast<int64_t>(values.size()));
        old.Release();
        reads.fetch_add(1);
      }
      stalled.clear();
    }
    for (const Answer& old : stalled) old.Release();
  });
  std::vector<std::thread> workers;
  for (int worker = 0; worker < kWorkers; ++worker) {
    workers.emplace_back([&, worker] {
      for (int64_t step = 1; step <= kSteps; ++step) {
        Answer answer = harness.Push(worker, step, 0, Fill(harness.parameters, worker + 1.0f));
        harness.Land(worker, step);
        answer.Wait();
        ASSERT_TRUE(answer.status().ok()) << answer.status();
        std::vector<float> values = answer.values();
        EXPECT_EQ(std::count(values.begin(), values.end(), values[0]), static_cast<int64_t>(values.size()));
        answer.Release();
      }
    });
  }
  for (std::thread& thread : workers) thread.join();
  stop.store(true);
  reader.join();
  Answer info = harness.Call(0, 0, Info{});
  info.Wait();
  EXPECT_EQ(info.as<Info::Reply>().steps, kWorkers * kSteps);
  EXPECT_EQ(harness.shards[0]->StoreForTest().SegmentStepForTest(0, 0), kWorkers * kSteps);
  EXPECT_GT(reads.load(), 0);
}

TEST(ShardTest, AsyncAnswersWithTheNewestValueAtTheLanding) {
  Small harness({.workers = 2, .policy = Async{}});
  Answer slow = harness.Push(0, 1, 0, harness.Gradient(1));
  harness.Land(1, 10);
  std::vector<float> newest;
  for (int64_t step = 1; step <= 3; ++step) {
    Answer answer = harness.Push(1, step, 0, harness.Gradient(1));
    newest = answer.values();
    answer.Release();
  }
  EXPECT_FALSE(slow.there());
  harness.Land(0, 1);
  EXPECT_EQ(slow.values(), newest);
  EXPECT_EQ(slow.as<PushGradient::Reply>().step, 4);
}

TEST(BufferPoolTest, ReusesWhatComesBackAndOutlivesItsCreator) {
  std::shared_ptr<BufferPool> pool = BufferPool::Create(1 << 20);
  at::Tensor tensor = *pool->Take(1000);
  const void* memory = tensor.data_ptr();
  EXPECT_EQ(pool->bytes_out(), 4096u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 4096, 0u);
  tensor = at::Tensor();
  EXPECT_EQ(pool->bytes_out(), 0u);
  tensor = *pool->Take(900);
  EXPECT_EQ(tensor.data_ptr(), memory);
  EXPECT_EQ(pool->Take(1 << 20).status().code(), Code::kResourceExhausted);
  EXPECT_TRUE(pool->Take(1 << 20, size_t{8} << 20).ok());
  pool.reset();
  tensor.data_ptr<float>()[899] = 1;  // Still there.
}

}  // namespace
}  // namespace Atoll::shard_optim
