// Where every element of a model lives: which owner, which chunk, at which place. Pure and deterministic:
// workers and owners compute it from the same parameter list and agree without talking.
//
//   parameters   | conv.weight            |pad| conv.bias |pad| fc.weight                         |pad|
//   flat space   0                         64k              64k'                                   total
//   buckets      [ a large one: its own   ][ small ones, gathered ][ its own                        ]
//   owners       [ owner 0                          |  owner 1                                      ]
//   chunks       [ c0  ][ c1  ][ c2       ][ c3     ][c4           ][ c5      ][ c6      ][ c7      ]
//
// - Flat space: parameter after parameter, in order, each starting at a multiple of 64 elements. Within a
//   parameter elements stand in memory order (its storage, not its logical order). The gap behind a
//   parameter belongs to nobody.
// - Every cut lies at a multiple of 64 elements from a parameter's start: a sharded Adam is then bitwise the
//   unsharded one (its scalar tail is the last numel mod 8 elements of a parameter).
// - A bucket becomes final at once on a worker: a parameter of small_parameter_bytes or more is its own, runs
//   of smaller neighbours are gathered up to chunk_bytes.
// - A chunk is what one call carries: at most chunk_bytes, in one bucket, of one owner. On the wire it is
//   one contiguous float tensor of chunk.elements() elements: flat_begin .. flat_end of flat space, the gaps
//   between its segments included (what a gradient has there is ignored), so segment s lies at
//   s.flat_begin - chunk.flat_begin. A chunk of one large parameter is exactly a slice of its storage.
//
// Immutable once built; thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace Atoll::shard_optim {

/// Elements between allowed cuts, and of the alignment of a parameter's start in flat space.
inline constexpr int64_t kCutElements = 64;

/// A parameter as all workers must have it.
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  ///< In elements. Dense and without overlap, in any order of dimensions.
  c10::ScalarType dtype = c10::ScalarType::Float;

  int64_t numel() const;
  friend bool operator==(const ParameterSpec&, const ParameterSpec&) = default;
};

struct LayoutOptions {
  int owners = 1;                            ///< At least 1.
  size_t chunk_bytes = 4 << 20;              ///< 4 KiB to 1 GiB; rounded down to multiples of 256.
  size_t small_parameter_bytes = 256 << 10;  ///< Parameters below are gathered.
  friend bool operator==(const LayoutOptions&, const LayoutOptions&) = default;
};

/// A run of elements of one parameter.
struct Segment {
  int parameter = 0;       ///< Index into Layout::parameters().
  int64_t begin = 0;       ///< First element in the parameter's memory order; a multiple of 64.
  int64_t end = 0;         ///< One past the last.
  int64_t flat_begin = 0;  ///< Of `begin` in flat space.
  int64_t size() const { return end - begin; }
};

struct Chunk {
  int owner = 0;
  int bucket = 0;
  int64_t flat_begin = 0;
  int64_t flat_end = 0;           ///< The end of the last segment (without the gap behind it).
  std::vector<Segment> segments;  ///< At least one, in flat order, each with at least one element.
  /// Elements of its tensor on the wire.
  int64_t elements() const { return flat_end - flat_begin; }
  /// Place of a segment in that tensor.
  int64_t offset(const Segment& segment) const { return segment.flat_begin - flat_begin; }
};

struct Bucket {
  std::vector<int> parameters;  ///< Without those of 0 elements. One if large.
  int first_chunk = 0;          ///< Its chunks are consecutive.
  int chunk_count = 0;
};

struct OwnerRange {
  int64_t flat_begin = 0;
  int64_t flat_end = 0;  ///< Equal to flat_begin for an owner of nothing (more owners than blocks of 64).
  int first_chunk = 0;   ///< Its chunks are consecutive.
  int chunk_count = 0;
  int64_t elements = 0;  ///< Of parameters, gaps not counted.
};

class Layout {
 public:
  /// InvalidArgument names the parameter or option and what would be right: names empty, too long (4,096
  /// bytes) or taken twice; more than 64 dimensions; a dtype other than float; strides that overlap or leave
  /// holes; more than 2^20 parameters, 2^40 elements, 65,536 owners or 2^22 chunks.
  static absl::StatusOr<Layout> Create(std::vector<ParameterSpec> parameters, LayoutOptions options);

  const std::vector<ParameterSpec>& parameters() const { return parameters_; }
  const LayoutOptions& options() const { return options_; }
  /// In flat order. A chunk's index here is its number on the wire.
  const std::vector<Chunk>& chunks() const { return chunks_; }
  /// In flat order.
  const std::vector<Bucket>& buckets() const { return buckets_; }
  /// One per owner, in order, without holes.
  const std::vector<OwnerRange>& owners() const { return owners_; }
  int64_t flat_begin(int parameter) const { return flat_begin_[parameter]; }
  int64_t flat_size() const { return flat_size_; }
  /// -1 for a parameter of 0 elements, which is in no bucket.
  int bucket_of(int parameter) const { return bucket_of_[parameter]; }
  /// Elements of the largest chunk; 0 if there is none.
  int64_t max_chunk_elements() const { return max_chunk_elements_; }

 private:
  Layout() = default;
  void PlaceParameters();
  void MakeBuckets();
  void CutOwners();
  absl::Status MakeChunks();
  void AddChunk(int owner, int bucket, int64_t begin, int64_t end);

  std::vector<ParameterSpec> parameters_;
  LayoutOptions options_;
  std::vector<Chunk> chunks_;
  std::vector<Bucket> buckets_;
  std::vector<OwnerRange> owners_;
  std::vector<int64_t> flat_begin_;
  std::vector<int> bucket_of_;
  int64_t flat_size_ = 0;
  int64_t max_chunk_elements_ = 0;
};

/// Says where `theirs` first differs from `ours`, for an error that a user can act on ("parameter 3
/// 'fc.weight': sizes [10, 320] here, [10, 256] there"); empty if they are equal.
std::string FirstDifference(absl::Span<const ParameterSpec> ours, absl::Span<const ParameterSpec> theirs);

}  // namespace Atoll::shard_optim
