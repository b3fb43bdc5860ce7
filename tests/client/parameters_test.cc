#include "atoll/client/parameters.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "atoll/client/gradient_hook.h"
#include "atoll/client/staging.h"

namespace Atoll::client {
namespace {

using testing::HasSubstr;

at::Tensor Parameter(at::IntArrayRef sizes) { return at::rand(sizes).requires_grad_(true); }

std::string ErrorOf(std::vector<std::pair<std::string, at::Tensor>> items) {
  return std::string(ParameterSet::Create(NamedTensors(std::move(items))).status().message());
}

TEST(ParameterSet, RefusesWhatItCannotTrain) {
  at::Tensor good = Parameter({2, 3});
  EXPECT_THAT(ErrorOf({}), HasSubstr("no parameters"));
  EXPECT_THAT(ErrorOf({{"w", at::Tensor()}}), HasSubstr("'w' is undefined"));
  EXPECT_THAT(ErrorOf({{"w", at::rand({2})}}), HasSubstr("does not require grad"));
  EXPECT_THAT(ErrorOf({{"w", good * 2}}), HasSubstr("computed from others"));
  EXPECT_THAT(ErrorOf({{"w", at::rand({2}, at::kDouble).requires_grad_(true)}}), HasSubstr("Double"));
  at::Tensor holes = at::empty_strided({2, 2}, {4, 1}).requires_grad_(true);
  EXPECT_THAT(ErrorOf({{"w", holes}}), HasSubstr("leave holes"));
}

TEST(ParameterSet, OneTensorUnderTwoNamesIsTrainedOnce) {
  at::Tensor tied = Parameter({4});
  auto set = ParameterSet::Create(NamedTensors({{"first", tied}, {"second", tied}}));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->count(), 1);
  EXPECT_EQ(set->name(0), "first");
}

TEST(ParameterSet, TensorsThatShareMemoryAreNamed) {
  at::Tensor whole = at::rand({10});
  at::Tensor head = whole.narrow(0, 0, 6).detach().requires_grad_(true);
  at::Tensor tail = whole.narrow(0, 5, 5).detach().requires_grad_(true);
  EXPECT_THAT(ErrorOf({{"tail", tail}, {"head", head}}), HasSubstr("'head' and 'tail' share memory"));
  at::Tensor next = whole.narrow(0, 6, 4).detach().requires_grad_(true);
  EXPECT_TRUE(ParameterSet::Create(NamedTensors({{"head", head}, {"next", next}})).ok());
}

TEST(ParameterSet, FlattensInMemoryOrder) {
  at::Tensor transposed = at::rand({3, 2}).t().detach().requires_grad_(true);  // Column-major.
  auto set = ParameterSet::Create(NamedTensors({{"w", transposed}}));
  ASSERT_TRUE(set.ok()) << set.status();
  at::Tensor alike = at::rand({3, 2}).t();
  auto lent = set->Flatten(0, alike);
  ASSERT_TRUE(lent.ok());
  EXPECT_EQ(lent->const_data_ptr(), alike.const_data_ptr());  // No copy.
  at::Tensor other = at::rand({2, 3});
  auto copied = set->Flatten(0, other);
  ASSERT_TRUE(copied.ok());
  EXPECT_TRUE(copied->equal(other.t().contiguous().view(-1)));
  EXPECT_THAT(std::string(set->Flatten(0, at::rand({3, 2})).status().message()), HasSubstr("shape"));
  EXPECT_THAT(std::string(set->Flatten(0, at::rand({2, 3}, at::kDouble)).status().message()),
              HasSubstr("dtype"));
}

TEST(ParameterSet, NoticesExchangedMemory) {
  at::Tensor w = Parameter({4});
  auto set = ParameterSet::Create(NamedTensors({{"w", w}}));
  ASSERT_TRUE(set.ok());
  EXPECT_TRUE(set->CheckInPlace().ok());
  w.set_data(at::rand({4}));
  EXPECT_THAT(std::string(set->CheckInPlace().message()), HasSubstr("'w' was exchanged"));
}

TEST(ParameterSet, ABackwardThroughChangedValuesIsRefused) {
  at::Tensor w = Parameter({4});
  auto set = ParameterSet::Create(NamedTensors({{"w", w}}));
  ASSERT_TRUE(set.ok());
  at::Tensor loss = (w * w).sum();
  set->BumpVersions();
  EXPECT_THROW(loss.backward(), std::exception);
}

TEST(Staging, GathersAndScattersEachElementToItsPlace) {
  std::vector<std::pair<std::string, at::Tensor>> items;
  for (int i = 0; i < 7; ++i) items.emplace_back("p" + std::to_string(i), Parameter({37 + 50 * i}));
  auto set = ParameterSet::Create(NamedTensors(items));
  ASSERT_TRUE(set.ok());
  shard_optim::LayoutOptions options;
  options.owners = 3;
  options.chunk_bytes = 4096;
  auto layout = shard_optim::Layout::Create(set->specs(), options);
  ASSERT_TRUE(layout.ok()) << layout.status();
  Staging staging(*layout);
  std::vector<at::Tensor> sent;
  for (int i = 0; i < set->count(); ++i) {
    sent.push_back(at::rand({items[i].second.numel()}));
    const int bucket = layout->bucket_of(i);
    if (!staging.direct(layout->buckets()[bucket].first_chunk)) staging.Gather(*layout, i, sent[i]);
  }
  int gathered = 0;
  for (size_t c = 0; c < layout->chunks().size(); ++c) {
    if (staging.direct(c)) {
      for (const auto& segment : layout->chunks()[c].segments) {
        set->Slice(segment.parameter, segment.begin, segment.end)
            .copy_(sent[segment.parameter].narrow(0, segment.begin, segment.size()));
      }
      continue;
    }
    ++gathered;
    EXPECT_EQ(staging.gather(c).numel(), layout->chunks()[c].elements());
    staging.landing(c).copy_(staging.gather(c));
    staging.Scatter(*layout, c, *set);
  }
  EXPECT_GT(gathered, 1);
  for (int i = 0; i < set->count(); ++i) EXPECT_TRUE(items[i].second.detach().equal(sent[i])) << i;
}

TEST(GradientHook, TakesTheGradientAndHearsTheEnd) {
  at::Tensor w = Parameter({3});
  at::Tensor got;
  int ends = 0;
  ASSERT_TRUE(InstallGradientHook(w, [&] {
                got = TakeGradient(w);
                EXPECT_EQ(ends, 0);
                AtEndOfBackward([&] { ++ends; });
              }).ok());
  EXPECT_EQ(InstallGradientHook(w, [] {}).code(), absl::StatusCode::kFailedPrecondition);
  (w * 3).sum().backward();
  EXPECT_TRUE(got.equal(at::ones({3}) * 3));
  EXPECT_FALSE(w.grad().defined());
  EXPECT_EQ(ends, 1);
  RemoveGradientHook(w);
  (w * 3).sum().backward();
  EXPECT_TRUE(w.grad().defined());
}

TEST(Checksum, IsCrc32cOfAllBytesInOrder) {
  // RFC 3720, B.4: 32 bytes of zeros.
  EXPECT_EQ(Checksum(NamedTensors({{"z", at::zeros({8})}})), 0x8A9136AAu);
  at::Tensor values = at::arange(32, at::kByte);  // 0x00 .. 0x1f.
  EXPECT_EQ(Checksum(NamedTensors({{"v", values}})), 0x46DD794Eu);
  // Split anywhere, the same bytes.
  EXPECT_EQ(Checksum(NamedTensors({{"a", values.narrow(0, 0, 13)}, {"b", values.narrow(0, 13, 19)}})),
            0x46DD794Eu);
}

}  // namespace
}  // namespace Atoll::client
