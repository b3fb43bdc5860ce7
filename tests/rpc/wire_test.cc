#include "atoll/rpc/wire.h"

#include <gtest/gtest.h>

#include <random>

#include "atoll/rpc/buffer_pool.h"

namespace Atoll::rpc {
namespace {

std::string Request() {
  static const float kData[3] = {1, 2, 3};
  TensorOut small{{at::kFloat, {3}}, kData};
  TensorOut large{{at::kDouble, {1000, 2}}, nullptr};
  std::string header = EncodeRequest({"shard.push", 3}, absl::Seconds(5), true, {}, "body", {small, large});
  SetAcks(header.data(), {11, 12});
  SetNumber(header.data(), 13, true);
  SetCall(header.data(), 14, 15);
  return header;
}

TEST(Wire, RequestsComeBack) {
  std::string bytes = Request();
  const size_t sizes[] = {16000};
  auto header = Decode(bytes, sizes);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->prefix.what, What::kRequest);
  EXPECT_EQ(header->prefix.flags, kFlagAckNow | kFlagOneWay);
  EXPECT_EQ(header->prefix.acks, (Acks{11, 12}));
  EXPECT_EQ(header->prefix.number, 13u);
  EXPECT_EQ(header->prefix.call, 14u);
  EXPECT_EQ(header->prefix.watermark, 15u);
  EXPECT_EQ(header->timeout, absl::Seconds(5));
  EXPECT_EQ(header->method, "shard.push");
  EXPECT_EQ(header->version, 3u);
  EXPECT_EQ(header->body, "body");
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_TRUE(header->tensors[0].is_inline);
  EXPECT_EQ(header->tensors[0].bytes.size(), 12u);
  EXPECT_FALSE(header->tensors[1].is_inline);
  EXPECT_EQ(header->tensors[1].meta.bytes(), 16000u);
}

TEST(Wire, TimeoutsWithoutEndAndOfNothing) {
  auto forever = Decode(EncodeRequest({"m"}, absl::InfiniteDuration(), false, {}, "", {}), {});
  ASSERT_TRUE(forever.ok());
  EXPECT_EQ(forever->timeout, absl::InfiniteDuration());
  auto nothing = Decode(EncodeRequest({"m"}, -absl::Seconds(1), false, {}, "", {}), {});
  ASSERT_TRUE(nothing.ok());
  EXPECT_LE(nothing->timeout, absl::Nanoseconds(1));
}

TEST(Wire, RepliesAndHellosComeBack) {
  auto error = Decode(EncodeErrorReply(absl::OutOfRangeError("why"), base::Ran::kNo), {});
  ASSERT_TRUE(error.ok()) << error.status();
  EXPECT_EQ(error->code, absl::StatusCode::kOutOfRange);
  EXPECT_EQ(error->message, "why");
  EXPECT_EQ(error->ran, base::Ran::kNo);
  auto reply = Decode(EncodeReply({}, "b", {}), {});
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->code, absl::StatusCode::kOk);
  auto hello = Decode(EncodeHello({4, 5, {"unix:@x", "h:1"}}), {});
  ASSERT_TRUE(hello.ok()) << hello.status();
  EXPECT_EQ(hello->hello.attempt, 4u);
  EXPECT_EQ(hello->hello.accepted, 5u);
  EXPECT_EQ(hello->hello.addresses, (std::vector<std::string>{"unix:@x", "h:1"}));
  EXPECT_TRUE(Decode(EncodeBare(Kind::kBye, What::kNothing), {}).ok());
}

TEST(Wire, TensorsMustBeAsThePipeAnnouncedThem) {
  std::string bytes = Request();
  EXPECT_FALSE(Decode(bytes, {}).ok());
  const size_t other[] = {15999};
  EXPECT_FALSE(Decode(bytes, other).ok());
  const size_t more[] = {16000, 1};
  EXPECT_FALSE(Decode(bytes, more).ok());
  const size_t one[] = {1};
  EXPECT_FALSE(Decode(EncodeBare(Kind::kAck, What::kNothing), one).ok());
}

TEST(Wire, SizesThatOverflowAreRefused) {
  for (std::vector<int64_t> sizes : {std::vector<int64_t>{int64_t{1} << 40, int64_t{1} << 40},
                                     std::vector<int64_t>{int64_t{1} << 40, int64_t{1} << 40, 0},
                                     std::vector<int64_t>{-1}, std::vector<int64_t>(100, 1)}) {
    TensorOut tensor{{at::kFloat, sizes}, nullptr};
    const size_t announced[] = {4};
    EXPECT_FALSE(Decode(EncodeReply({}, "", {tensor}), announced).ok());
  }
}

TEST(Wire, ABundleHoldsTheHeadersThatWereAdded) {
  BundleWriter writer;
  SetNumber(writer.Add(Request()), 7, true);
  writer.Add(EncodeBare(Kind::kData, What::kCancel, 9));
  const std::string bytes = std::move(writer).Take();
  auto bundle = Decode(bytes, {});
  ASSERT_TRUE(bundle.ok()) << bundle.status();
  EXPECT_EQ(bundle->prefix.kind, Kind::kBundle);
  ASSERT_EQ(bundle->parts.size(), 2u);
  const size_t sizes[] = {16000};
  auto request = Decode(bundle->parts[0], sizes);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->prefix.number, 7u);
  EXPECT_EQ(Decode(bundle->parts[1], {})->prefix.call, 9u);
  for (size_t length = 0; length < bytes.size(); ++length) {
    std::vector<char> cut(bytes.begin(), bytes.begin() + static_cast<long>(length));
    EXPECT_FALSE(Decode(absl::string_view(cut.data(), cut.size()), {}).ok()) << length;
  }
  EXPECT_FALSE(Decode(bytes, sizes).ok());  // Tensors of its own.
  for (size_t at = 1; at < kPrefixBytes; ++at) {
    std::string odd = bytes;
    odd[at] = 1;
    EXPECT_FALSE(Decode(odd, {}).ok()) << at;
  }
  EXPECT_FALSE(Decode(EncodeBare(Kind::kBundle, What::kNothing) + std::string(4, '\0'), {}).ok());
  BundleWriter large;
  for (size_t size = 0; size < kMinHeaderLimit; size += 1000) {
    large.Add(EncodeRequest({"m"}, absl::Seconds(1), false, {}, std::string(1000, 'x'), {}));
  }
  EXPECT_FALSE(Decode(std::move(large).Take(), {}).ok());
  for (Kind kind : {Kind::kHello, Kind::kAck, Kind::kBye, Kind::kBundle}) {
    BundleWriter odd;
    odd.Add(EncodeBare(kind, What::kNothing));
    EXPECT_FALSE(Decode(std::move(odd).Take(), {}).ok());
  }
}

// Scenarios rpc 48, users 19.
TEST(Wire, EveryTruncationAndEveryChangedByteIsReadSafely) {
  const std::string whole = Request();
  const size_t sizes[] = {16000};
  for (size_t length = 0; length < whole.size(); ++length) {
    // A copy of exact length, so that a sanitizer sees a read behind it.
    std::vector<char> bytes(whole.begin(), whole.begin() + static_cast<long>(length));
    EXPECT_FALSE(Decode(absl::string_view(bytes.data(), bytes.size()), sizes).ok()) << length;
  }
  EXPECT_FALSE(Decode(whole + "x", sizes).ok());
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    std::vector<char> bytes(whole.begin(), whole.end());
    for (int change = 0; change < 1 + i % 3; ++change)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    auto header = Decode(absl::string_view(bytes.data(), bytes.size()), sizes);
    if (header.ok()) {
      EXPECT_LE(header->tensors.size(), bytes.size());
    }
  }
}

TEST(BufferPool, UsesMemoryAgainWithinItsLimit) {
  auto pool = BufferPool::Create(4 << 20);
  TensorMeta meta{at::kFloat, {1 << 18}};
  void* first = nullptr;
  {
    auto tensor = pool->Allocate(meta);
    ASSERT_TRUE(tensor.ok());
    first = tensor->data_ptr();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 4096, 0u);
    EXPECT_TRUE(tensor->is_contiguous());
    EXPECT_EQ(tensor->sizes(), at::IntArrayRef({1 << 18}));
  }
  EXPECT_EQ(pool->kept_bytes(), 1u << 20);
  auto again = pool->Allocate(meta);
  EXPECT_EQ(again->data_ptr(), first);
  {
    std::vector<at::Tensor> many;
    for (int i = 0; i < 10; ++i) many.push_back(*pool->Allocate(meta));
  }
  EXPECT_EQ(pool->kept_bytes(), 4u << 20);
  // A tensor may outlive everything else.
  pool = nullptr;
  EXPECT_EQ(again->numel(), 1 << 18);
}

TEST(BufferPool, NoMemoryIsAnErrorNotAnEnd) {
  auto pool = BufferPool::Create(0);
  auto tensor = pool->Allocate({at::kFloat, {int64_t{1} << 55}});
  EXPECT_TRUE(absl::IsResourceExhausted(tensor.status()));
}

}  // namespace
}  // namespace Atoll::rpc
