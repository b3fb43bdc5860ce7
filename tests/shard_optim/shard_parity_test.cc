// The whole shard against torch.optim.Adam(fused=True): any owner count, any arrival order, the same bits.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "live_python.h"
#include "recorded.h"
#include "shard_harness.h"

namespace Atoll::shard_optim {
namespace {

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<bool> Defined(const Recorded& recorded, int64_t step) {
  std::vector<bool> defined(recorded.parameters.size(), true);
  if (recorded.late && step <= 2) defined.back() = false;
  return defined;
}

void ExpectEnd(const Recorded& recorded, Harness& harness, const std::string& what) {
  std::vector<std::vector<float>> end = harness.PullAll(Recorded::kSteps);
  for (size_t p = 0; p < end.size(); ++p)
    EXPECT_TRUE(SameBits(end[p], recorded.end[p])) << what << " parameter " << p;
  for (size_t c = 0; c < harness.layout().chunks().size(); ++c) {
    const Chunk& chunk = harness.layout().chunks()[c];
    const ChunkStore& store = harness.shards[chunk.owner]->StoreForTest();
    int index = static_cast<int>(c) - harness.layout().owners()[chunk.owner].first_chunk;
    for (size_t s = 0; s < chunk.segments.size(); ++s) {
      const Segment& segment = chunk.segments[s];
      size_t bytes = segment.size() * sizeof(float);
      const int p = segment.parameter;
      EXPECT_EQ(std::memcmp(store.ExpAvgForTest(index, s), recorded.exp_avg[p].data() + segment.begin, bytes),
                0)
          << what;
      EXPECT_EQ(
          std::memcmp(store.ExpAvgSqForTest(index, s), recorded.exp_avg_sq[p].data() + segment.begin, bytes),
          0)
          << what;
      bool late = recorded.late && p + 1 == static_cast<int>(recorded.parameters.size());
      EXPECT_EQ(store.SegmentStepForTest(index, s), Recorded::kSteps - (late ? 2 : 0));
    }
  }
}

// Every worker's pushes and landing of a step, in one random order.
void ReplayShuffled(const Recorded& recorded, int owners, uint32_t seed) {
  Harness harness(recorded.parameters,
                  {.owners = owners, .workers = recorded.workers, .chunk_bytes = 64 << 10});
  harness.optimizer = recorded.optimizer;
  harness.Begin(recorded.start);
  std::mt19937 random(seed);
  const int chunks = static_cast<int>(harness.layout().chunks().size());
  for (int64_t step = 1; step <= Recorded::kSteps; ++step) {
    std::vector<std::pair<int, int>> events;
    for (int worker = 0; worker < recorded.workers; ++worker) {
      for (int chunk = 0; chunk <= chunks; ++chunk) events.emplace_back(worker, chunk);
    }
    std::shuffle(events.begin(), events.end(), random);
    std::vector<Answer> answers;
    for (auto [worker, chunk] : events) {
      if (chunk == chunks) {
        harness.Land(worker, step);
      } else {
        answers.push_back(
            harness.Push(worker, step, chunk, recorded.gradients[step - 1][worker], Defined(recorded, step)));
      }
    }
    for (Answer& answer : answers) {
      ASSERT_TRUE(answer.status().ok()) << answer.status();
      EXPECT_EQ(answer.as<PushGradient::Reply>().contributors, recorded.workers);
      EXPECT_EQ(answer.as<PushGradient::Reply>().step, step);
      answer.Release();
    }
  }
  ExpectEnd(recorded, harness, absl::StrCat(owners, " owners, ", recorded.workers, " workers,"));
}

TEST(ShardParityTest, BitwiseTorchForAnyOwnersAndAnyOrder) {
  ATOLL_NEEDS_PYTHON();
  ASSERT_FALSE(Recordings().empty());
  uint32_t seed = 1;
  for (const Recorded& recorded : Recordings()) {
    for (int owners : {1, 2, 3}) ReplayShuffled(recorded, owners, ++seed);
  }
}

TEST(ShardParityTest, BitwiseTorchWithWorkersAsThreads) {
  ATOLL_NEEDS_PYTHON();
  ASSERT_FALSE(Recordings().empty());
  const Recorded& recorded = Recordings()[4];
  ASSERT_EQ(recorded.workers, 3);
  base::ThreadPool pool({.name = "shards", .threads = 3});
  {
    Harness harness(recorded.parameters,
                    {.owners = 2, .workers = 3, .chunk_bytes = 64 << 10, .executor = &pool});
    harness.optimizer = recorded.optimizer;
    harness.Begin(recorded.start);
    std::vector<std::thread> workers;
    std::vector<std::vector<std::vector<float>>> replicas(3, recorded.start);
    for (int worker = 0; worker < 3; ++worker) {
      workers.emplace_back([&, worker] {
        const int chunks = static_cast<int>(harness.layout().chunks().size());
        for (int64_t step = 1; step <= Recorded::kSteps; ++step) {
          std::vector<Answer> answers;
          for (int i = 0; i < chunks; ++i) {
            int chunk = (i + worker) % chunks;
            answers.push_back(harness.Push(worker, step, chunk, recorded.gradients[step - 1][worker]));
          }
          harness.Land(worker, step);
          for (int i = 0; i < chunks; ++i) {
            answers[i].Wait();
            ASSERT_TRUE(answers[i].status().ok()) << answers[i].status();
            harness.Scatter((i + worker) % chunks, answers[i].values(), replicas[worker]);
            answers[i].Release();
          }
        }
      });
    }
    for (std::thread& thread : workers) thread.join();
    ExpectEnd(recorded, harness, "threads");
    for (auto& replica : replicas) {
      for (size_t p = 0; p < replica.size(); ++p) EXPECT_TRUE(SameBits(replica[p], recorded.end[p]));
    }
  }
}

}  // namespace
}  // namespace Atoll::shard_optim
