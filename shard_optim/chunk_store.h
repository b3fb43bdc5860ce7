// One owner's chunks: their values, the optimizer's state, and the contributions on their way in.
//
//   Fold, Fold, ... Apply ──> Value (n + 1) ──Lend──> Loan, Loan ... in replies on the wire
//                              Value (n) lives on while it is lent, and its memory then serves again
//
// A value that is lent is never written: the pass then writes the new one into a spare. Spares are bounded;
// where there is none, Apply waits for a loan to end (it says so and is to be called again).
//
// Confined to the shard's serial executor, but for Loan, which may end in any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "atoll/shard_optim/buffer_pool.h"
#include "atoll/shard_optim/layout_core.h"
#include "atoll/shard_optim/options.h"

namespace Atoll::shard_optim {

/// One worker's part in one step of one chunk.
struct Contribution {
  at::Tensor gradient;    ///< chunk.elements() floats; undefined if no segment is defined. Is written to.
  std::string defined;    ///< As PushGradient::defined.
  AdamOptions optimizer;  ///< Used for the step are those of the first one folded.
};

class ChunkStore {
  struct Value;

 public:
  /// Keeps one value unwritten while it exists. Movable; empty if default-made.
  class Loan {
   public:
    Loan() = default;
    Loan(Loan&&) noexcept = default;
    Loan& operator=(Loan&& other) noexcept;
    ~Loan() { End(); }
    explicit operator bool() const { return value_ != nullptr; }
    const at::Tensor& tensor() const;

   private:
    friend class ChunkStore;
    explicit Loan(std::shared_ptr<Value> value);
    void End();
    std::shared_ptr<Value> value_;
  };

  /// The chunks of `owner`; numbered from 0 here. `layout` must outlive it. `on_loan_end` is called (any
  /// thread, no lock held) when a loan has ended. ResourceExhausted: no memory for it.
  static absl::StatusOr<std::unique_ptr<ChunkStore>> Create(const Layout* layout, int owner,
                                                            size_t spare_bytes,
                                                            std::function<void()> on_loan_end);
  ~ChunkStore();

  int size() const { return static_cast<int>(chunks_.size()); }
  const Chunk& chunk(int index) const;
  /// Sets a value. Requires: chunk.elements() floats, and that it is not lent.
  void Load(int index, const at::Tensor& tensor);

  /// Takes the next contribution, in rank order.
  void Fold(int index, Contribution contribution);
  /// Forgets what was folded since the last Apply.
  void Discard(int index);
  /// Applies what was folded, the mean being over `contributors`; false if there is no spare now. A segment
  /// that nobody defined keeps its value and its step count.
  bool Apply(int index, int contributors);

  Loan Lend(int index);

  /// Of optimizer state, step counts included.
  uint64_t state_bytes() const;
  /// Steps applied to a segment, and its exp_avg and exp_avg_sq.
  int64_t SegmentStepForTest(int index, size_t segment) const { return chunks_[index].steps[segment]; }
  const float* ExpAvgForTest(int index, size_t segment) const;
  const float* ExpAvgSqForTest(int index, size_t segment) const;

 private:
  struct Value {
    at::Tensor tensor;
    std::atomic<int> loans{0};
    std::shared_ptr<std::function<void()>> on_loan_end;
  };
  struct Folded {
    Contribution contribution;
    std::string undefined;  // Bit by segment: somebody in it had no gradient.
  };
  struct State {
    std::shared_ptr<Value> value;
    std::vector<int64_t> steps;  // By segment.
    float* exp_avg = nullptr;    // Laid out as the value.
    float* exp_avg_sq = nullptr;
    std::vector<Folded> folded;
  };

  ChunkStore(const Layout* layout, int owner) : layout_(layout), owner_(owner) {}
  absl::Status Allocate(size_t spare_bytes);
  absl::StatusOr<std::shared_ptr<Value>> NewValue(int64_t elements);
  void ClearGaps(int index, float* value) const;
  void AddSecondToFirst(int index);
  void ApplySegment(int index, size_t segment, int contributors, const float* from, float* to);

  const Layout* const layout_;
  const int owner_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<std::function<void()>> on_loan_end_;
  void* arena_ = nullptr;  // exp_avg and exp_avg_sq of all chunks.
  size_t arena_bytes_ = 0;
  std::vector<State> chunks_;
};

}  // namespace Atoll::shard_optim
