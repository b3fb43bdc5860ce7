// Who may write what when: staging, lent values, spares; and async, where readers meet writers.
#include <algorithm>
#include <atomic>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shard_harness.h"

namespace Atoll::shard_optim {
namespace {

using Code = absl::StatusCode;

TEST(ShardMemoryTest, StagingIsReusedAndBounded) {
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

TEST(ShardMemoryTest, AllocateChecksBeforeAnyByteMoves) {
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

TEST(ShardMemoryTest, ALentValueIsNeverWritten) {
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

TEST(ShardMemoryTest, WithoutASpareTheChunkWaitsForAReader) {
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

TEST(ShardAsyncTest, AsyncStepsEqualThePushesAndNoReaderSeesATornSlice) {
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

TEST(ShardAsyncTest, AsyncAnswersWithTheNewestValueAtTheLanding) {
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
