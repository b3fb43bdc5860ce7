#include "atoll/shard_optim/adam.h"

#include <cmath>
#include <cstring>

#include "atoll/shard_optim/layout_core.h"
#include "gtest/gtest.h"
#include "live_python.h"
#include "recorded.h"

namespace Atoll::shard_optim {
namespace {

// First index at which the bits differ; -1 if none does.
int64_t FirstBitDifference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return static_cast<int64_t>(i);
  }
  return -1;
}

struct State {
  Recorded::Tensors parameters, exp_avg, exp_avg_sq;
  std::vector<int64_t> steps;
};

State Start(const Recorded& recorded) {
  State state;
  state.parameters = recorded.start;
  for (const auto& parameter : recorded.start) {
    state.exp_avg.emplace_back(parameter.size());
    state.exp_avg_sq.emplace_back(parameter.size());
  }
  state.steps.resize(recorded.start.size());
  return state;
}

void ReplayStep(const Recorded& recorded, const Layout& layout, int step, State& state) {
  std::vector<bool> advanced(state.steps.size(), false);
  for (const Chunk& chunk : layout.chunks()) {
    for (const Segment& segment : chunk.segments) {
      int p = segment.parameter;
      if (recorded.late && p + 1 == static_cast<int>(state.steps.size()) && step < 2) continue;
      if (!advanced[p]) ++state.steps[p];
      advanced[p] = true;
      std::vector<const float*> gradients;
      for (const auto& worker : recorded.gradients[step])
        gradients.push_back(worker[p].data() + segment.begin);
      AdamSlice slice;
      slice.param_in = state.parameters[p].data() + segment.begin;
      slice.param_out = state.parameters[p].data() + segment.begin;
      slice.exp_avg = state.exp_avg[p].data() + segment.begin;
      slice.exp_avg_sq = state.exp_avg_sq[p].data() + segment.begin;
      slice.gradients = gradients;
      slice.divisor = recorded.workers;
      slice.size = segment.size();
      slice.tail = AdamTail(recorded.parameters[p].numel(), segment.end);
      AdamPass(recorded.optimizer, state.steps[p], slice);
    }
  }
}

TEST(AdamTest, BitwiseEqualToTorchsFusedAdamForAnyCut) {
  ATOLL_NEEDS_PYTHON();
  ASSERT_FALSE(Recordings().empty());
  for (const Recorded& recorded : Recordings()) {
    for (int owners : {1, 2, 3}) {
      for (size_t chunk_bytes : {size_t{4096}, size_t{100} << 10, size_t{4} << 20}) {
        Layout layout = *Layout::Create(recorded.parameters, {.owners = owners, .chunk_bytes = chunk_bytes});
        State state = Start(recorded);
        for (int step = 0; step < Recorded::kSteps; ++step) ReplayStep(recorded, layout, step, state);
        for (size_t p = 0; p < recorded.start.size(); ++p) {
          std::string what = testing::PrintToString(recorded.parameters[p].sizes) + " workers " +
                             std::to_string(recorded.workers) + " decay " +
                             std::to_string(recorded.optimizer.weight_decay) + " beta1 " +
                             std::to_string(recorded.optimizer.beta1) + " owners " + std::to_string(owners);
          EXPECT_EQ(FirstBitDifference(state.parameters[p], recorded.end[p]), -1) << "parameter " << what;
          EXPECT_EQ(FirstBitDifference(state.exp_avg[p], recorded.exp_avg[p]), -1) << "exp_avg " << what;
          EXPECT_EQ(FirstBitDifference(state.exp_avg_sq[p], recorded.exp_avg_sq[p]), -1)
              << "exp_avg_sq " << what;
        }
      }
    }
  }
}

// One step of one element each, written out in double: the formula itself, apart from rounding.
TEST(AdamTest, FollowsTheFormula) {
  AdamOptions options{.lr = 0.1, .beta1 = 0.8, .beta2 = 0.9, .eps = 0.01, .weight_decay = 0.5};
  std::vector<float> p = {1, -2, 3, 0.5, -0.25, 8, 1, 1, 2, 3, 4}, m(11, 0.5), v(11, 0.25), out(11);
  std::vector<float> a(11, 1), b(11, -3), c(11, 0.5);
  std::vector<const float*> gradients = {a.data(), b.data(), c.data()};
  AdamSlice slice{p.data(), out.data(), m.data(), v.data(), gradients, 3, false, 11, 3};
  AdamPass(options, 2, slice);
  for (size_t i = 0; i < p.size(); ++i) {
    double g = (1.0 - 3.0 + 0.5) / 3 + 0.5 * p[i];
    double mean = 0.8 * 0.5 + 0.2 * g;
    double square = 0.9 * 0.25 + 0.1 * g * g;
    double expected = p[i] - 0.1 * (mean / (1 - 0.8 * 0.8)) / (std::sqrt(square / (1 - 0.9 * 0.9)) + 0.01);
    EXPECT_NEAR(out[i], expected, 1e-5 * std::abs(expected) + 1e-6);
    EXPECT_NEAR(m[i], mean, 1e-6);
    EXPECT_NEAR(v[i], square, 1e-6);
  }
}

TEST(AdamTest, AddingThePrefixFirstChangesNothing) {
  std::vector<std::vector<float>> gradients(6, std::vector<float>(1003));
  uint32_t seed = 1;
  for (auto& gradient : gradients) {
    for (float& value : gradient)
      value = static_cast<float>((seed = seed * 1664525 + 1013904223) >> 8) - 8e6f;
  }
  auto run = [&](size_t prefix) {
    std::vector<std::vector<float>> g = gradients;
    for (size_t i = 1; i < prefix; ++i) AddTo(g[0].data(), g[i].data(), 1003);
    std::vector<const float*> rest = {g[0].data()};
    for (size_t i = std::max<size_t>(prefix, 1); i < g.size(); ++i) rest.push_back(g[i].data());
    std::vector<float> p(1003, 1), m(1003, 0), v(1003, 0);
    AdamSlice slice{p.data(), p.data(), m.data(), v.data(), rest, 6, false, 1003, 1003 % 8};
    AdamPass({}, 1, slice);
    return p;
  };
  EXPECT_EQ(FirstBitDifference(run(3), run(6)), -1);
  EXPECT_EQ(FirstBitDifference(run(3), run(5)), -1);
}

TEST(AdamTest, AMissingGradientCountsAsZero) {
  float negative_zero = -0.0f;
  auto mean_after = [&](bool add_zero) {
    float p = 1, m = -0.0f, v = 0;
    const float* gradient = &negative_zero;
    AdamSlice slice{&p, &p, &m, &v, absl::MakeSpan(&gradient, 1), 2, add_zero, 1, 0};
    AdamPass({.beta1 = 0.25}, 1, slice);  // The lerp then starts at the gradient and keeps its sign.
    return m;
  };
  EXPECT_FALSE(std::signbit(mean_after(true)));  // -0 + 0 is +0.
}

}  // namespace
}  // namespace Atoll::shard_optim
