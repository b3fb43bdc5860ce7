// The owner's pass over one slice: the contributions' sum, its mean, weight decay, Adam, and the new value,
// in one walk over memory (24 + 4 N bytes a parameter for N contributions).
//
// Bitwise equal to adding the gradients in order, dividing, and at::_fused_adam_ on CPUs with AVX2. Its
// rules, found by comparing (torch 2.11); rounding to float after each operation, FMA only where written:
//   g  = fma(p, wd, g)                                    if wd != 0
//   m  = fma(1 - b1, g - m, m)                            if 1 - b1 < 0.5, else fma(-b1', g - m, g)
//   v  = fma((1 - b2) * g, g, v * b2)                     but in torch's scalar tail, the last numel mod 8
//   v  = fma(v, b2, ((1 - b2) * g) * g)                   elements of a parameter, the other way round
//   p += (-lr / (1 - b1^t) * m) / (sqrt(v) / sqrt(1 - b2^t) + eps)
// The coefficients are made in double and rounded to float once. (b1' is 1 - (1 - b1), in float.)
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "atoll/shard_optim/options.h"

namespace Atoll::shard_optim {

/// One run of elements of one parameter. The arrays overlap nowhere, but param_out may be param_in.
struct AdamSlice {
  const float* param_in = nullptr;
  float* param_out = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  /// The contributions, in rank order; at least one, at most kMaxFusedGradients (add earlier ones with
  /// AddTo).
  absl::Span<const float* const> gradients;
  int divisor = 1;  ///< How many workers the mean is over; at least 1.
  /// Some of these workers had no gradient: theirs count as zero. (It turns a sum of -0 into +0.)
  bool add_zero = false;
  int64_t size = 0;
  int64_t tail = 0;  ///< Of the `size` elements, the last that are in the parameter's scalar tail: 0 to 7.
};
inline constexpr int kMaxFusedGradients = 4;

/// numel mod 8 if the run that ends at `end` is the parameter's last, else 0.
int64_t AdamTail(int64_t numel, int64_t end);

/// Applies step number `step` (of this parameter, from 1).
void AdamPass(const AdamOptions& options, int64_t step, const AdamSlice& slice);

/// sum[i] += gradient[i].
void AddTo(float* sum, const float* gradient, int64_t size);

}  // namespace Atoll::shard_optim
