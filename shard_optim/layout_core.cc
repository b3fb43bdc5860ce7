#include "atoll/shard_optim/layout_core.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace Atoll::shard_optim {
namespace {

constexpr size_t kMaxParameters = size_t{1} << 20;
constexpr int64_t kMaxElements = int64_t{1} << 40;
constexpr size_t kMaxChunks = size_t{1} << 22;
constexpr size_t kMaxDimensions = 64;
constexpr size_t kMaxNameBytes = 4096;

int64_t RoundUp(int64_t value) { return (value + kCutElements - 1) / kCutElements * kCutElements; }

std::string List(const std::vector<int64_t>& values) {
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

// Elements of `spec`, or an error that names it. Guards every later multiplication.
absl::StatusOr<int64_t> CheckedNumel(const ParameterSpec& spec) {
  int64_t numel = 1;
  for (int64_t size : spec.sizes) {
    if (size < 0) return absl::InvalidArgumentError("a negative size");
    if (size != 0 && numel > kMaxElements / size) {
      return absl::InvalidArgumentError(absl::StrCat("more than ", kMaxElements, " elements"));
    }
    numel *= size;
  }
  return numel;
}

// Dense and without overlap: sorted by stride, each stride is the product of the sizes before it.
bool IsDense(const ParameterSpec& spec) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // Stride, size.
  for (size_t i = 0; i < spec.sizes.size(); ++i) {
    if (spec.sizes[i] == 0) return true;
    if (spec.sizes[i] > 1) dims.emplace_back(spec.strides[i], spec.sizes[i]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (auto [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

absl::Status CheckParameter(const ParameterSpec& spec) {
  if (spec.name.empty() || spec.name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a name has 1 to ", kMaxNameBytes, " bytes"));
  }
  if (spec.sizes.size() > kMaxDimensions || spec.sizes.size() != spec.strides.size()) {
    return absl::InvalidArgumentError(absl::StrCat(spec.sizes.size(), " sizes and ", spec.strides.size(),
                                                   " strides: expected as many of both, at most ",
                                                   kMaxDimensions));
  }
  if (spec.dtype != c10::ScalarType::Float) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype ", c10::toString(spec.dtype), ": parameters must be float (float32)"));
  }
  absl::StatusOr<int64_t> numel = CheckedNumel(spec);
  if (!numel.ok()) return numel.status();
  if (!IsDense(spec)) {
    return absl::InvalidArgumentError(absl::StrCat("sizes ", List(spec.sizes), " with strides ",
                                                   List(spec.strides),
                                                   " overlap or leave holes: make it contiguous"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const LayoutOptions& options) {
  if (options.owners < 1 || options.owners > 65536) {
    return absl::InvalidArgumentError(absl::StrCat(options.owners, " owners: expected 1 to 65536"));
  }
  if (options.chunk_bytes < 4096 || options.chunk_bytes > (size_t{1} << 30)) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk_bytes ", options.chunk_bytes, ": expected 4096 to ", size_t{1} << 30));
  }
  return absl::OkStatus();
}

absl::Status CheckParameters(const std::vector<ParameterSpec>& parameters) {
  if (parameters.size() > kMaxParameters) {
    return absl::InvalidArgumentError(
        absl::StrCat(parameters.size(), " parameters: at most ", kMaxParameters));
  }
  absl::flat_hash_map<absl::string_view, size_t> seen;
  int64_t elements = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i];
    absl::Status status = CheckParameter(spec);
    if (status.ok()) {
      auto [other, fresh] = seen.emplace(spec.name, i);
      if (!fresh)
        status = absl::InvalidArgumentError(absl::StrCat("its name is parameter ", other->second, "'s"));
    }
    if (status.ok() && (elements += RoundUp(spec.numel())) > kMaxElements) {
      status = absl::InvalidArgumentError(
          absl::StrCat("with it the model has more than ", kMaxElements, " elements"));
    }
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", i, " '", absl::string_view(spec.name).substr(0, 256), "': ", status.message()));
    }
  }
  return absl::OkStatus();
}

// What differs between two parameters of one place; empty if nothing.
std::string Difference(const ParameterSpec& ours, const ParameterSpec& theirs) {
  if (ours.name != theirs.name) {
    return absl::StrCat("'", ours.name, "' here, '", theirs.name, "' there");
  }
  if (ours.sizes != theirs.sizes) {
    return absl::StrCat("'", ours.name, "': sizes ", List(ours.sizes), " here, ", List(theirs.sizes),
                        " there");
  }
  if (ours.dtype != theirs.dtype) {
    return absl::StrCat("'", ours.name, "': dtype ", c10::toString(ours.dtype), " here, ",
                        c10::toString(theirs.dtype), " there");
  }
  if (ours.strides != theirs.strides) {
    return absl::StrCat("'", ours.name, "': strides ", List(ours.strides), " here, ", List(theirs.strides),
                        " there");
  }
  return "";
}

}  // namespace

int64_t ParameterSpec::numel() const {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  return numel;
}

std::string FirstDifference(absl::Span<const ParameterSpec> ours, absl::Span<const ParameterSpec> theirs) {
  size_t common = std::min(ours.size(), theirs.size());
  for (size_t i = 0; i < common; ++i) {
    std::string difference = Difference(ours[i], theirs[i]);
    if (!difference.empty()) return absl::StrCat("parameter ", i, " ", difference);
  }
  if (ours.size() == theirs.size()) return "";
  bool more_here = ours.size() > theirs.size();
  return absl::StrCat(ours.size(), " parameters here, ", theirs.size(), " there; the first beyond is '",
                      (more_here ? ours : theirs)[common].name, "', only ", more_here ? "here" : "there");
}

absl::StatusOr<Layout> Layout::Create(std::vector<ParameterSpec> parameters, LayoutOptions options) {
  absl::Status status = CheckOptions(options);
  if (status.ok()) status = CheckParameters(parameters);
  if (!status.ok()) return status;
  Layout layout;
  layout.parameters_ = std::move(parameters);
  layout.options_ = options;
  layout.PlaceParameters();
  layout.MakeBuckets();
  layout.CutOwners();
  status = layout.MakeChunks();
  if (!status.ok()) return status;
  return layout;
}

void Layout::PlaceParameters() {
  flat_begin_.reserve(parameters_.size());
  for (const ParameterSpec& spec : parameters_) {
    flat_begin_.push_back(flat_size_);
    flat_size_ += RoundUp(spec.numel());
  }
}

void Layout::MakeBuckets() {
  bucket_of_.assign(parameters_.size(), -1);
  size_t gathered_bytes = 0;  // Of the last bucket, if smaller parameters may still join it; else 0.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    int64_t numel = parameters_[i].numel();
    if (numel == 0) continue;
    size_t bytes = static_cast<size_t>(RoundUp(numel)) * sizeof(float);
    bool small = static_cast<size_t>(numel) * sizeof(float) < options_.small_parameter_bytes;
    bool joins = small && gathered_bytes > 0 && gathered_bytes + bytes <= options_.chunk_bytes;
    if (!joins) {
      buckets_.emplace_back();
      gathered_bytes = 0;
    }
    buckets_.back().parameters.push_back(static_cast<int>(i));
    bucket_of_[i] = static_cast<int>(buckets_.size()) - 1;
    if (small) gathered_bytes += bytes;
  }
}

void Layout::CutOwners() {
  const int64_t blocks = flat_size_ / kCutElements;
  for (int k = 0; k < options_.owners; ++k) {
    OwnerRange range;
    range.flat_begin = blocks * k / options_.owners * kCutElements;
    range.flat_end = blocks * (k + 1) / options_.owners * kCutElements;
    owners_.push_back(range);
  }
}

absl::Status Layout::MakeChunks() {
  const int64_t max_blocks = static_cast<int64_t>(options_.chunk_bytes / sizeof(float)) / kCutElements;
  int owner = 0;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.first_chunk = static_cast<int>(chunks_.size());
    int last = bucket.parameters.back();
    int64_t at = flat_begin_[bucket.parameters.front()];
    const int64_t end = flat_begin_[last] + RoundUp(parameters_[last].numel());
    while (at < end) {
      while (owners_[owner].flat_end <= at) ++owner;
      // The owner's part of the bucket, in as few pieces as fit, of about equal size.
      int64_t part_end = std::min(end, owners_[owner].flat_end);
      int64_t blocks = (part_end - at) / kCutElements;
      int64_t pieces = (blocks + max_blocks - 1) / max_blocks;
      int64_t step = (blocks + pieces - 1) / pieces * kCutElements;
      if (chunks_.size() + static_cast<size_t>(pieces) > kMaxChunks) {
        return absl::InvalidArgumentError(absl::StrCat(
            "more than ", kMaxChunks, " chunks: raise chunk_bytes (", options_.chunk_bytes, ")"));
      }
      for (; at < part_end; at = std::min(at + step, part_end)) {
        AddChunk(owner, static_cast<int>(b), at, std::min(at + step, part_end));
      }
    }
    bucket.chunk_count = static_cast<int>(chunks_.size()) - bucket.first_chunk;
  }
  int next = 0;
  for (OwnerRange& range : owners_) {  // An owner of nothing starts where its neighbour's chunks end.
    range.first_chunk = next;
    next += range.chunk_count;
  }
  return absl::OkStatus();
}

void Layout::AddChunk(int owner, int bucket, int64_t begin, int64_t end) {
  Chunk chunk;
  chunk.owner = owner;
  chunk.bucket = bucket;
  chunk.flat_begin = begin;
  const std::vector<int>& candidates = buckets_[bucket].parameters;
  auto first = std::upper_bound(candidates.begin(), candidates.end(), begin,
                                [this](int64_t at, int p) { return at < flat_begin_[p]; });
  for (auto p = first - 1; p != candidates.end() && flat_begin_[*p] < end; ++p) {
    Segment segment;
    segment.parameter = *p;
    segment.begin = std::max<int64_t>(0, begin - flat_begin_[*p]);
    segment.end = std::min(parameters_[*p].numel(), end - flat_begin_[*p]);
    segment.flat_begin = flat_begin_[*p] + segment.begin;
    chunk.segments.push_back(segment);
    chunk.flat_end = segment.flat_begin + segment.size();
    owners_[owner].elements += segment.size();
  }
  ++owners_[owner].chunk_count;
  max_chunk_elements_ = std::max(max_chunk_elements_, chunk.elements());
  chunks_.push_back(std::move(chunk));
}

}  // namespace Atoll::shard_optim
