#include "atoll/shard_optim/layout_core.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace Atoll::shard_optim {
namespace {

using ::testing::HasSubstr;

ParameterSpec Spec(std::string name, std::vector<int64_t> sizes) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.sizes = std::move(sizes);
  spec.strides.resize(spec.sizes.size());
  int64_t stride = 1;
  for (size_t i = spec.sizes.size(); i-- > 0;) {
    spec.strides[i] = stride;
    stride *= std::max<int64_t>(1, spec.sizes[i]);
  }
  return spec;
}

std::vector<ParameterSpec> Vectors(const std::vector<int64_t>& numels) {
  std::vector<ParameterSpec> specs;
  for (size_t i = 0; i < numels.size(); ++i) specs.push_back(Spec(absl::StrCat("p", i), {numels[i]}));
  return specs;
}

// Everything that layout_core.h promises, for one layout.
void CheckInvariants(const Layout& layout) {
  std::vector<int64_t> next(layout.parameters().size(), 0);  // First element not yet seen, by parameter.
  std::vector<int64_t> owner_elements(layout.owners().size(), 0);
  int64_t flat = 0;
  for (size_t c = 0; c < layout.chunks().size(); ++c) {
    const Chunk& chunk = layout.chunks()[c];
    ASSERT_FALSE(chunk.segments.empty());
    ASSERT_GE(chunk.flat_begin, flat);
    ASSERT_LE(chunk.elements() * sizeof(float), layout.options().chunk_bytes);
    ASSERT_LE(chunk.elements(), layout.max_chunk_elements());
    const OwnerRange& owner = layout.owners()[chunk.owner];
    ASSERT_GE(static_cast<int>(c), owner.first_chunk);
    ASSERT_LT(static_cast<int>(c), owner.first_chunk + owner.chunk_count);
    ASSERT_GE(chunk.flat_begin, owner.flat_begin);
    ASSERT_LE(chunk.flat_end, owner.flat_end);
    const Bucket& bucket = layout.buckets()[chunk.bucket];
    ASSERT_GE(static_cast<int>(c), bucket.first_chunk);
    ASSERT_LT(static_cast<int>(c), bucket.first_chunk + bucket.chunk_count);
    int64_t at = chunk.flat_begin;
    for (const Segment& segment : chunk.segments) {
      ASSERT_GT(segment.size(), 0);
      ASSERT_EQ(segment.begin % kCutElements, 0);
      ASSERT_EQ(segment.flat_begin % kCutElements, 0);
      ASSERT_EQ(segment.begin, next[segment.parameter]) << "a hole or an overlap";
      ASSERT_EQ(segment.flat_begin, layout.flat_begin(segment.parameter) + segment.begin);
      ASSERT_GE(segment.flat_begin, at);
      ASSERT_EQ(layout.bucket_of(segment.parameter), chunk.bucket);
      at = segment.flat_begin + segment.size();
      next[segment.parameter] = segment.end;
      owner_elements[chunk.owner] += segment.size();
    }
    ASSERT_EQ(at, chunk.flat_end);
    flat = chunk.flat_end;
  }
  int chunks = 0;
  int64_t flat_end = 0;
  for (size_t k = 0; k < layout.owners().size(); ++k) {
    const OwnerRange& owner = layout.owners()[k];
    ASSERT_EQ(owner.first_chunk, chunks);
    ASSERT_EQ(owner.flat_begin, flat_end);
    ASSERT_EQ(owner.flat_begin % kCutElements, 0);
    ASSERT_EQ(owner.elements, owner_elements[k]);
    // Balanced to one block.
    ASSERT_NEAR(owner.flat_end - owner.flat_begin, layout.flat_size() / double(layout.owners().size()),
                kCutElements);
    chunks += owner.chunk_count;
    flat_end = owner.flat_end;
  }
  ASSERT_EQ(chunks, static_cast<int>(layout.chunks().size()));
  ASSERT_EQ(flat_end, layout.flat_size());
  for (size_t p = 0; p < next.size(); ++p) {
    ASSERT_EQ(next[p], layout.parameters()[p].numel()) << "parameter " << p << " is not covered";
    ASSERT_EQ(layout.flat_begin(p) % kCutElements, 0);
    ASSERT_EQ(layout.bucket_of(p) == -1, next[p] == 0);
  }
}

TEST(LayoutTest, CoversEveryElementOnceForRandomModels) {
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    std::vector<int64_t> numels;
    for (int p = random() % 12; p >= 0; --p) {
      numels.push_back(random() % 4 == 0 ? random() % 100000 : random() % 200);
    }
    LayoutOptions options;
    options.owners = 1 + random() % 5;
    options.chunk_bytes = 4096 << (random() % 5);
    options.small_parameter_bytes = 1 << (random() % 18);
    absl::StatusOr<Layout> layout = Layout::Create(Vectors(numels), options);
    ASSERT_TRUE(layout.ok()) << layout.status();
    CheckInvariants(*layout);
    if (HasFatalFailure()) return;
  }
}

TEST(LayoutTest, EdgesOfSize) {
  for (const std::vector<int64_t>& numels : std::vector<std::vector<int64_t>>{
           {}, {0}, {1}, {0, 1, 0}, {1, 1, 1}, {64}, {65}, {5000000}, {1, 5000000, 1}}) {
    for (int owners : {1, 2, 3, 7}) {
      absl::StatusOr<Layout> layout = Layout::Create(Vectors(numels), {.owners = owners});
      ASSERT_TRUE(layout.ok()) << layout.status();
      CheckInvariants(*layout);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(LayoutTest, MoreOwnersThanBlocksLeavesSomeWithNothing) {
  Layout layout = *Layout::Create(Vectors({3}), {.owners = 4});
  int with = 0;
  for (const OwnerRange& owner : layout.owners()) with += owner.chunk_count;
  EXPECT_EQ(with, 1);
  EXPECT_EQ(layout.chunks()[0].elements(), 3);
}

TEST(LayoutTest, LargeParametersAreBucketsOfTheirOwnAndSmallOnesAreGathered) {
  // 256 KiB is 65,536 floats: the first size that counts as large.
  Layout layout = *Layout::Create(Vectors({10, 20, 65536, 65535, 0, 7, 3000000}), {});
  std::vector<std::vector<int>> buckets;
  for (const Bucket& bucket : layout.buckets()) buckets.push_back(bucket.parameters);
  EXPECT_EQ(buckets, (std::vector<std::vector<int>>{{0, 1}, {2}, {3, 5}, {6}}));
  EXPECT_EQ(layout.buckets()[3].chunk_count, 3);  // 12 MB in pieces of at most 4 MiB.
  EXPECT_EQ(layout.chunks()[0].segments.size(), 2u);
  EXPECT_EQ(layout.chunks()[0].elements(), 64 + 20);
  CheckInvariants(layout);
}

TEST(LayoutTest, GatheredBucketsStayWithinAChunk) {
  Layout layout = *Layout::Create(Vectors({500, 500, 500, 500}), {.chunk_bytes = 4096});
  EXPECT_EQ(layout.buckets().size(), 2u);
  CheckInvariants(layout);
}

TEST(LayoutTest, DenseStridesOfAnyOrderAreTaken) {
  ParameterSpec spec = Spec("conv", {8, 3, 5, 5});
  spec.strides = {75, 1, 15, 3};  // Channels last.
  EXPECT_TRUE(Layout::Create({spec}, {}).ok());
  spec = Spec("one", {1, 4});
  spec.strides = {77, 1};  // A dimension of one element has no stride that matters.
  EXPECT_TRUE(Layout::Create({spec}, {}).ok());
}

TEST(LayoutTest, ErrorsNameTheParameterAndWhatWouldBeRight) {
  auto error = [](std::vector<ParameterSpec> specs, LayoutOptions options = {}) {
    absl::StatusOr<Layout> layout = Layout::Create(std::move(specs), options);
    EXPECT_EQ(layout.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(layout.status().message());
  };
  EXPECT_THAT(error({Spec("a", {2}), Spec("a", {2})}),
              HasSubstr("parameter 1 'a': its name is parameter 0's"));
  ParameterSpec bad = Spec("w", {4, 4});
  bad.strides = {8, 1};
  EXPECT_THAT(error({bad}), HasSubstr("parameter 0 'w': sizes [4, 4] with strides [8, 1]"));
  bad.strides = {0, 1};
  EXPECT_THAT(error({bad}), HasSubstr("overlap"));
  bad = Spec("d", {4});
  bad.dtype = c10::ScalarType::Double;
  EXPECT_THAT(error({bad}), HasSubstr("dtype Double"));
  EXPECT_THAT(error({Spec("huge", {int64_t{1} << 31, int64_t{1} << 31})}), HasSubstr("huge"));
  EXPECT_THAT(error({Spec("n", {-1})}), HasSubstr("negative"));
  EXPECT_THAT(error({Spec("", {1})}), HasSubstr("name"));
  EXPECT_THAT(error({Spec("a", {1})}, {.owners = 0}), HasSubstr("0 owners"));
  EXPECT_THAT(error({Spec("a", {1})}, {.chunk_bytes = 1}), HasSubstr("chunk_bytes 1"));
}

TEST(FirstDifferenceTest, NamesTheFirst) {
  std::vector<ParameterSpec> ours = {Spec("a", {2, 3}), Spec("b", {4})};
  EXPECT_EQ(FirstDifference(ours, ours), "");
  auto theirs = ours;
  theirs[1].sizes = {5};
  theirs[1].strides = {1};
  EXPECT_EQ(FirstDifference(ours, theirs), "parameter 1 'b': sizes [4] here, [5] there");
  theirs = ours;
  theirs[0].strides = {1, 2};
  EXPECT_EQ(FirstDifference(ours, theirs), "parameter 0 'a': strides [3, 1] here, [1, 2] there");
  theirs = ours;
  theirs[0].name = "z";
  EXPECT_EQ(FirstDifference(ours, theirs), "parameter 0 'a' here, 'z' there");
  theirs = ours;
  theirs.push_back(Spec("c", {1}));
  EXPECT_EQ(FirstDifference(ours, theirs), "2 parameters here, 3 there; the first beyond is 'c', only there");
}

}  // namespace
}  // namespace Atoll::shard_optim
