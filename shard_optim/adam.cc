// Compiled with -O3 -fno-math-errno -fno-trapping-math -ffp-contract=off, so that plain loops become vector
// code and no FMA appears that is not written. The widest form that this CPU has is chosen at run time by
// hand: the compiler's own way (target_clones) resolves before a sanitizer's run-time is there, which ends
// the process.
#include "atoll/shard_optim/adam.h"

#include <cmath>

namespace Atoll::shard_optim {
namespace {

struct Coefficients {
  float lerp;           // 1 - b1, or b1' negated.
  bool lerp_from_mean;  // The lerp starts at m (a small weight) and not at g.
  float beta2;
  float square;     // 1 - b2.
  float root;       // sqrt(1 - b2^t).
  float step_size;  // -lr / (1 - b1^t).
  float eps;
  float decay;
  float divisor;
  float zero;  // Added to the sum: -0, which changes nothing, or +0.
};

Coefficients Make(const AdamOptions& options, int64_t step, int divisor, bool add_zero) {
  double correction1 = 1 - std::pow(options.beta1, static_cast<double>(step));
  double correction2 = 1 - std::pow(options.beta2, static_cast<double>(step));
  Coefficients c;
  c.lerp = static_cast<float>(1 - options.beta1);
  c.lerp_from_mean = c.lerp < 0.5f;
  if (!c.lerp_from_mean) c.lerp -= 1.0f;
  c.beta2 = static_cast<float>(options.beta2);
  c.square = static_cast<float>(1 - options.beta2);
  c.root = static_cast<float>(std::sqrt(correction2));
  c.step_size = static_cast<float>(-(options.lr / correction1));
  c.eps = static_cast<float>(options.eps);
  c.decay = static_cast<float>(options.weight_decay);
  c.divisor = static_cast<float>(divisor);
  c.zero = add_zero ? 0.0f : -0.0f;
  return c;
}

// Plain pointers: a Span's indirections would keep the loops from becoming vector code.
struct Arrays {
  const float* param_in;
  float* param_out;
  float* exp_avg;
  float* exp_avg_sq;
  const float* gradient[kMaxFusedGradients];
};

template <int kGradients, bool kMean, bool kDecay, bool kFromMean, bool kTail>
[[gnu::always_inline]] inline void Loop(const Coefficients& c, const Arrays& a, int64_t begin, int64_t end) {
  const float* param_in = a.param_in;
  float* param_out = a.param_out;
  float* exp_avg = a.exp_avg;
  float* exp_avg_sq = a.exp_avg_sq;
  const float* g0 = a.gradient[0];
  const float* g1 = a.gradient[1];
  const float* g2 = a.gradient[2];
  const float* g3 = a.gradient[3];
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    float g = g0[i];
    if constexpr (kGradients > 1) g += g1[i];
    if constexpr (kGradients > 2) g += g2[i];
    if constexpr (kGradients > 3) g += g3[i];
    if constexpr (kMean) g = (g + c.zero) / c.divisor;
    float p = param_in[i];
    if constexpr (kDecay) g = __builtin_fmaf(p, c.decay, g);
    float m = exp_avg[i];
    m = __builtin_fmaf(c.lerp, g - m, kFromMean ? m : g);
    float v = exp_avg_sq[i];
    if constexpr (kTail) {
      v = __builtin_fmaf(v, c.beta2, c.square * g * g);
    } else {
      v = __builtin_fmaf(c.square * g, g, v * c.beta2);
    }
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    param_out[i] = p + c.step_size * m / (__builtin_sqrtf(v) / c.root + c.eps);
  }
}

template <int kGradients, bool kMean, bool kDecay, bool kFromMean>
[[gnu::always_inline]] inline void Both(const Coefficients& c, const Arrays& a, int64_t vector_end,
                                        int64_t size) {
  Loop<kGradients, kMean, kDecay, kFromMean, false>(c, a, 0, vector_end);
  Loop<kGradients, kMean, kDecay, kFromMean, true>(c, a, vector_end, size);
}

template <int kGradients, bool kMean>
[[gnu::always_inline]] inline void Pick(const Coefficients& c, const Arrays& a, int64_t vector_end,
                                        int64_t size) {
  if (!c.lerp_from_mean) {  // Rare (beta1 <= 0.5): not worth more code; a decay of 0 would still change -0.
    if (c.decay != 0) return Both<kGradients, kMean, true, false>(c, a, vector_end, size);
    return Both<kGradients, kMean, false, false>(c, a, vector_end, size);
  }
  if (c.decay != 0) return Both<kGradients, kMean, true, true>(c, a, vector_end, size);
  Both<kGradients, kMean, false, true>(c, a, vector_end, size);
}

[[gnu::always_inline]] inline void Pass(const Coefficients& c, const Arrays& a, int count, bool mean,
                                        int64_t vector_end, int64_t size) {
  switch (count) {
    case 1:
      if (!mean) return Pick<1, false>(c, a, vector_end, size);
      return Pick<1, true>(c, a, vector_end, size);
    case 2:
      return Pick<2, true>(c, a, vector_end, size);
    case 3:
      return Pick<3, true>(c, a, vector_end, size);
    default:
      return Pick<4, true>(c, a, vector_end, size);
  }
}

[[gnu::always_inline]] inline void Add(float* sum, const float* gradient, int64_t size) {
#pragma GCC ivdep
  for (int64_t i = 0; i < size; ++i) sum[i] += gradient[i];
}

using PassFunction = void (*)(const Coefficients&, const Arrays&, int, bool, int64_t, int64_t);
using AddFunction = void (*)(float*, const float*, int64_t);

void PassPlain(const Coefficients& c, const Arrays& a, int count, bool mean, int64_t vector_end,
               int64_t size) {
  Pass(c, a, count, mean, vector_end, size);
}
void AddPlain(float* sum, const float* gradient, int64_t size) { Add(sum, gradient, size); }

#if defined(__x86_64__)
#define ATOLL_V3 [[gnu::target("avx2,fma,bmi2")]]
#define ATOLL_V4 [[gnu::target("avx2,fma,bmi2,avx512f,avx512vl,avx512dq,avx512bw,prefer-vector-width=256")]]

ATOLL_V3 void PassV3(const Coefficients& c, const Arrays& a, int count, bool mean, int64_t vector_end,
                     int64_t size) {
  Pass(c, a, count, mean, vector_end, size);
}
ATOLL_V3 void AddV3(float* sum, const float* gradient, int64_t size) { Add(sum, gradient, size); }
ATOLL_V4 void PassV4(const Coefficients& c, const Arrays& a, int count, bool mean, int64_t vector_end,
                     int64_t size) {
  Pass(c, a, count, mean, vector_end, size);
}
ATOLL_V4 void AddV4(float* sum, const float* gradient, int64_t size) { Add(sum, gradient, size); }

bool HasV3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
bool HasV4() {
  return HasV3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
PassFunction ChoosePass() { return HasV4() ? PassV4 : HasV3() ? PassV3 : PassPlain; }
AddFunction ChooseAdd() { return HasV4() ? AddV4 : HasV3() ? AddV3 : AddPlain; }
#else
PassFunction ChoosePass() { return PassPlain; }
AddFunction ChooseAdd() { return AddPlain; }
#endif

}  // namespace

int64_t AdamTail(int64_t numel, int64_t end) { return end == numel ? numel % 8 : 0; }

void AdamPass(const AdamOptions& options, int64_t step, const AdamSlice& slice) {
  static const PassFunction pass = ChoosePass();
  Coefficients c = Make(options, step, slice.divisor, slice.add_zero);
  Arrays arrays{slice.param_in, slice.param_out, slice.exp_avg, slice.exp_avg_sq, {}};
  int count = static_cast<int>(slice.gradients.size());
  for (int i = 0; i < kMaxFusedGradients; ++i) arrays.gradient[i] = slice.gradients[i < count ? i : 0];
  bool mean = count > 1 || slice.divisor != 1 || slice.add_zero;
  pass(c, arrays, count, mean, slice.size - slice.tail, slice.size);
}

void AddTo(float* sum, const float* gradient, int64_t size) {
  static const AddFunction add = ChooseAdd();
  add(sum, gradient, size);
}

}  // namespace Atoll::shard_optim
