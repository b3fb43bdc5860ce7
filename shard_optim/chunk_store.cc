#include "atoll/shard_optim/chunk_store.h"

#include <sys/mman.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "atoll/shard_optim/adam.h"

namespace Atoll::shard_optim {
namespace {

bool Bit(const std::string& bits, size_t i) { return (bits[i / 8] >> (i % 8) & 1) != 0; }
void SetBit(std::string& bits, size_t i) { bits[i / 8] = static_cast<char>(bits[i / 8] | 1 << (i % 8)); }

}  // namespace

ChunkStore::Loan::Loan(std::shared_ptr<Value> value) : value_(std::move(value)) {
  value_->loans.fetch_add(1, std::memory_order_relaxed);
}
ChunkStore::Loan& ChunkStore::Loan::operator=(Loan&& other) noexcept {
  if (this != &other) {
    End();
    value_ = std::move(other.value_);
  }
  return *this;
}
const at::Tensor& ChunkStore::Loan::tensor() const { return value_->tensor; }

void ChunkStore::Loan::End() {
  if (value_ == nullptr) return;
  auto on_loan_end = value_->on_loan_end;
  value_->loans.fetch_sub(1, std::memory_order_release);  // What the reader read was read before.
  value_.reset();  // An old value's memory is back before anyone is told.
  (*on_loan_end)();
}

absl::StatusOr<std::unique_ptr<ChunkStore>> ChunkStore::Create(const Layout* layout, int owner,
                                                               size_t spare_bytes,
                                                               std::function<void()> on_loan_end) {
  std::unique_ptr<ChunkStore> store(new ChunkStore(layout, owner));
  store->on_loan_end_ = std::make_shared<std::function<void()>>(std::move(on_loan_end));
  absl::Status status = store->Allocate(spare_bytes);
  if (!status.ok()) return status;
  return store;
}

absl::Status ChunkStore::Allocate(size_t spare_bytes) {
  const OwnerRange& range = layout_->owners()[owner_];
  const size_t elements = static_cast<size_t>(range.flat_end - range.flat_begin);
  if (elements > 0) {
    arena_bytes_ = 2 * elements * sizeof(float);
    void* memory = mmap(nullptr, arena_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for ", arena_bytes_, " bytes of optimizer state"));
    }
    arena_ = memory;
    madvise(arena_, arena_bytes_, MADV_HUGEPAGE);
  }
  // A buffer's size class is at most an eighth larger than what is in it, and at least a page.
  const size_t value_bytes = elements * sizeof(float);
  pool_ = BufferPool::Create(value_bytes + value_bytes / 8 + 4096 * static_cast<size_t>(range.chunk_count) +
                             spare_bytes);
  chunks_.resize(range.chunk_count);
  for (int i = 0; i < size(); ++i) {
    State& state = chunks_[i];
    absl::StatusOr<std::shared_ptr<Value>> value = NewValue(chunk(i).elements());
    if (!value.ok()) return value.status();
    state.value = *std::move(value);
    state.steps.resize(chunk(i).segments.size());
    state.exp_avg = static_cast<float*>(arena_) + (chunk(i).flat_begin - range.flat_begin);
    state.exp_avg_sq = state.exp_avg + elements;
  }
  return absl::OkStatus();
}

ChunkStore::~ChunkStore() {
  if (arena_ != nullptr) munmap(arena_, arena_bytes_);
}

const Chunk& ChunkStore::chunk(int index) const {
  return layout_->chunks()[layout_->owners()[owner_].first_chunk + index];
}

absl::StatusOr<std::shared_ptr<ChunkStore::Value>> ChunkStore::NewValue(int64_t elements) {
  absl::StatusOr<at::Tensor> tensor = pool_->Take(elements);
  if (!tensor.ok()) return tensor.status();
  auto value = std::make_shared<Value>();
  value->tensor = *std::move(tensor);
  value->on_loan_end = on_loan_end_;
  return value;
}

// What once was in a reused buffer leaves with no value.
void ChunkStore::ClearGaps(int index, float* value) const {
  const std::vector<Segment>& segments = chunk(index).segments;
  for (size_t s = 0; s + 1 < segments.size(); ++s) {
    const int64_t end = chunk(index).offset(segments[s]) + segments[s].size();
    std::memset(value + end, 0, (chunk(index).offset(segments[s + 1]) - end) * sizeof(float));
  }
}

void ChunkStore::Load(int index, const at::Tensor& tensor) {
  float* value = chunks_[index].value->tensor.data_ptr<float>();
  std::memcpy(value, tensor.data_ptr<float>(), chunk(index).elements() * sizeof(float));
  ClearGaps(index, value);
}

void ChunkStore::Fold(int index, Contribution contribution) {
  State& state = chunks_[index];
  std::string undefined = contribution.defined;
  for (char& byte : undefined) byte = static_cast<char>(~byte);
  state.folded.push_back({std::move(contribution), std::move(undefined)});
  if (state.folded.size() > kMaxFusedGradients) AddSecondToFirst(index);
}

// Keeps the number of buffers that a chunk holds bounded; the order of the additions stays.
void ChunkStore::AddSecondToFirst(int index) {
  State& state = chunks_[index];
  Folded& first = state.folded[0];
  Folded& second = state.folded[1];
  if (!first.contribution.gradient.defined()) std::swap(first, second);
  for (size_t s = 0; s < chunk(index).segments.size() && second.contribution.gradient.defined(); ++s) {
    const Segment& segment = chunk(index).segments[s];
    if (!Bit(second.contribution.defined, s)) continue;
    float* sum = first.contribution.gradient.data_ptr<float>() + chunk(index).offset(segment);
    const float* gradient = second.contribution.gradient.data_ptr<float>() + chunk(index).offset(segment);
    if (Bit(first.contribution.defined, s)) {
      AddTo(sum, gradient, segment.size());
    } else {
      std::memcpy(sum, gradient, segment.size() * sizeof(float));
      SetBit(first.contribution.defined, s);
    }
  }
  for (size_t i = 0; i < first.undefined.size(); ++i) {
    first.undefined[i] = static_cast<char>(first.undefined[i] | second.undefined[i]);
  }
  state.folded.erase(state.folded.begin() + 1);
}

void ChunkStore::Discard(int index) { chunks_[index].folded.clear(); }

bool ChunkStore::Apply(int index, int contributors) {
  State& state = chunks_[index];
  bool any = false;
  for (const Folded& folded : state.folded) {
    for (char byte : folded.contribution.defined) any |= byte != 0;
  }
  if (!any) {
    state.folded.clear();
    return true;
  }
  std::shared_ptr<Value> target = state.value;
  if (state.value->loans.load(std::memory_order_acquire) > 0) {
    absl::StatusOr<std::shared_ptr<Value>> spare = NewValue(chunk(index).elements());
    if (!spare.ok()) return false;
    target = *std::move(spare);
  }
  const float* from = state.value->tensor.data_ptr<float>();
  float* to = target->tensor.data_ptr<float>();
  for (size_t s = 0; s < chunk(index).segments.size(); ++s) ApplySegment(index, s, contributors, from, to);
  if (from != to) ClearGaps(index, to);
  state.value = std::move(target);
  state.folded.clear();
  return true;
}

void ChunkStore::ApplySegment(int index, size_t s, int contributors, const float* from, float* to) {
  State& state = chunks_[index];
  const Segment& segment = chunk(index).segments[s];
  const int64_t offset = chunk(index).offset(segment);
  const float* gradients[kMaxFusedGradients];
  size_t count = 0;
  AdamSlice slice;
  for (const Folded& folded : state.folded) {
    if (Bit(folded.undefined, s)) slice.add_zero = true;
    if (!Bit(folded.contribution.defined, s)) continue;
    gradients[count++] = folded.contribution.gradient.data_ptr<float>() + offset;
  }
  if (count == 0) {
    if (from != to) std::memcpy(to + offset, from + offset, segment.size() * sizeof(float));
    return;
  }
  slice.param_in = from + offset;
  slice.param_out = to + offset;
  slice.exp_avg = state.exp_avg + offset;
  slice.exp_avg_sq = state.exp_avg_sq + offset;
  slice.gradients = absl::MakeConstSpan(gradients, count);
  slice.divisor = contributors;
  slice.size = segment.size();
  slice.tail = AdamTail(layout_->parameters()[segment.parameter].numel(), segment.end);
  AdamPass(state.folded[0].contribution.optimizer, ++state.steps[s], slice);
}

ChunkStore::Loan ChunkStore::Lend(int index) { return Loan(chunks_[index].value); }

uint64_t ChunkStore::state_bytes() const {
  uint64_t bytes = 2 * sizeof(float) * static_cast<uint64_t>(layout_->owners()[owner_].elements);
  for (const State& state : chunks_) bytes += state.steps.size() * sizeof(int64_t);
  return bytes;
}

const float* ChunkStore::ExpAvgForTest(int index, size_t segment) const {
  return chunks_[index].exp_avg + chunk(index).offset(chunk(index).segments[segment]);
}
const float* ChunkStore::ExpAvgSqForTest(int index, size_t segment) const {
  return chunks_[index].exp_avg_sq + chunk(index).offset(chunk(index).segments[segment]);
}

}  // namespace Atoll::shard_optim
