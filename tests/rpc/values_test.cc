#include "atoll/rpc/values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "agent_fixture.h"
#include "atoll/base/bytes.h"

namespace Atoll::rpc {
namespace {

using c10::IValue;
using ::testing::HasSubstr;

// What the other side would have, without a network.
Received Arrived(Payload payload) {
  Received received;
  received.body = std::move(payload.body);
  for (OutTensor& tensor : payload.tensors) {
    received.tensors.push_back(tensor.tensor.resolve_conj().contiguous().clone());
  }
  return received;
}

std::vector<IValue> RoundTrip(std::vector<IValue> values) {
  auto payload = EncodeValues(std::move(values));
  EXPECT_TRUE(payload.ok()) << payload.status();
  if (!payload.ok()) return {};
  auto decoded = DecodeValues(Arrived(*std::move(payload)));
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  return decoded.ok() ? *std::move(decoded) : std::vector<IValue>();
}

TEST(Values, PlainOnesComeAsTheyWent) {
  const std::vector<IValue> values = {IValue(),
                                      true,
                                      false,
                                      int64_t{-1} << 62,
                                      -0.5,
                                      c10::complex<double>(1, -2),
                                      std::string("text\0with a zero", 16),
                                      std::string()};
  const std::vector<IValue> back = RoundTrip(values);
  ASSERT_EQ(back.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(back[i], values[i]) << i;
  EXPECT_TRUE(RoundTrip({}).empty());
}

TEST(Values, ContainersKeepTheirTypes) {
  c10::Dict<std::string, at::Tensor> named;
  named.insert("w", at::arange(3));
  c10::Dict<int64_t, double> numbers;
  numbers.insert(7, 0.25);
  c10::impl::GenericList anything(c10::AnyType::get());
  anything.push_back(IValue(1));
  anything.push_back(IValue("two"));
  c10::List<std::optional<at::Tensor>> optional;
  optional.push_back(std::nullopt);
  optional.push_back(at::ones({2}));
  c10::List<c10::List<int64_t>> nested;
  nested.push_back(c10::List<int64_t>({1, 2}));
  nested.push_back(c10::List<int64_t>());
  const std::vector<IValue> back = RoundTrip(
      {IValue(c10::List<int64_t>({3, 1, 2})), IValue(c10::List<double>()), IValue(c10::List<bool>({true})),
       IValue(c10::List<at::Tensor>({at::ones({2}), at::zeros({0, 3})})),
       IValue(c10::List<std::string>({"a", ""})), IValue(named), IValue(numbers), IValue(anything),
       IValue(optional), IValue(nested),
       c10::ivalue::Tuple::create(
           {IValue(1), c10::ivalue::Tuple::create({IValue("in")}), IValue(at::ones({}))})});
  ASSERT_EQ(back.size(), 11u);
  EXPECT_EQ(back[0].toIntVector(), (std::vector<int64_t>{3, 1, 2}));
  EXPECT_TRUE(back[1].isDoubleList());
  EXPECT_TRUE(back[2].isBoolList());
  ASSERT_TRUE(back[3].isTensorList());
  EXPECT_EQ(back[3].toTensorVector()[1].sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(back[4].toListRef()[0].toStringRef(), "a");
  const auto back_named = c10::impl::toTypedDict<std::string, at::Tensor>(back[5].toGenericDict());
  EXPECT_TRUE(back_named.at("w").equal(at::arange(3)));
  EXPECT_EQ((c10::impl::toTypedDict<int64_t, double>(back[6].toGenericDict()).at(7)), 0.25);
  EXPECT_EQ(back[7].toListRef()[1].toStringRef(), "two");
  EXPECT_TRUE(back[8].isOptionalTensorList());
  EXPECT_EQ(back[9].toListRef()[0].toIntVector(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(back[10].toTupleRef().elements()[1].toTupleRef().elements()[0].toStringRef(), "in");
}

// Scenario rpc 5.
TEST(Values, SparseTensorsOfEveryLayout) {
  const at::Tensor dense =
      at::arange(1, 25, at::kFloat).view({4, 6}).mul(at::arange(24).view({4, 6}).remainder(3).eq(0));
  const at::Tensor coo = at::sparse_coo_tensor(at::tensor({0, 1, 1, 2, 0, 2}, at::kLong).view({2, 3}),
                                               at::tensor({3.f, 4.f, 5.f}), {2, 3});
  const std::vector<at::Tensor> tensors = {coo,
                                           coo.coalesce(),
                                           dense.to_sparse(1),
                                           dense.to_sparse_csr(),
                                           dense.to_sparse_csc(),
                                           dense.to_sparse_bsr({2, 3}),
                                           dense.to_sparse_bsc({2, 3}),
                                           at::zeros({3, 0}).to_sparse(),
                                           dense.to(at::kBFloat16).to_sparse_csr()};
  for (const at::Tensor& tensor : tensors) {
    SCOPED_TRACE(c10::toString(tensor.scalar_type()));
    const std::vector<IValue> back = RoundTrip({tensor});
    ASSERT_EQ(back.size(), 1u);
    const at::Tensor got = back[0].toTensor();
    EXPECT_EQ(got.layout(), tensor.layout());
    EXPECT_EQ(got.sizes(), tensor.sizes());
    EXPECT_EQ(got._nnz(), tensor._nnz());
    const bool coo = tensor.layout() == at::kSparse;
    EXPECT_EQ(coo && got.is_coalesced(), coo && tensor.is_coalesced());
    EXPECT_TRUE(got.to_dense().equal(tensor.to_dense()));
  }
}

// Scenario rpc 14.
TEST(Values, ATensorGivenTwiceIsOneThereToo) {
  const at::Tensor twice = at::arange(4);
  const at::Tensor view = twice.narrow(0, 1, 2);
  auto payload = EncodeValues({twice, view, IValue(c10::List<at::Tensor>({twice}))});
  ASSERT_TRUE(payload.ok());
  EXPECT_EQ(payload->tensors.size(), 2u);
  auto back = DecodeValues(Arrived(*std::move(payload)));
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE((*back)[0].toTensor().is_same((*back)[2].toTensorVector()[0]));
  (*back)[0].toTensor().fill_(9);
  EXPECT_TRUE((*back)[1].toTensor().equal(at::tensor({1, 2}, at::kLong)));  // Two views: two tensors.
}

TEST(Values, OnlyWhatNobodyElseHoldsIsLent) {
  at::Tensor held = at::ones({4});
  std::vector<IValue> values = {held};  // A braced list would hold what is in it, too.
  values.emplace_back(at::ones({5}));
  auto payload = EncodeValues(std::move(values));
  ASSERT_TRUE(payload.ok());
  EXPECT_FALSE(payload->tensors[0].lent);
  EXPECT_TRUE(payload->tensors[1].lent);
  auto viewed = EncodeValues({held.view({2, 2})});  // Another tensor has this memory.
  ASSERT_TRUE(viewed.ok());
  EXPECT_FALSE(viewed->tensors[0].lent);
}

TEST(Values, UndefinedTensorsAreUndefinedThere) {
  const std::vector<IValue> back = RoundTrip({at::Tensor(), IValue(c10::List<at::Tensor>({at::Tensor()}))});
  ASSERT_EQ(back.size(), 2u);
  EXPECT_FALSE(back[0].toTensor().defined());
  EXPECT_FALSE(back[1].toTensorVector()[0].defined());
}

// Scenarios rpc 19, users 23.
TEST(Values, WhatDoesNotTravelIsRefusedByName) {
  const auto refused = [](IValue value) {
    auto payload = EncodeValues({IValue(1), std::move(value)});
    EXPECT_TRUE(absl::IsInvalidArgument(payload.status())) << payload.status();
    return std::string(payload.status().message());
  };
  EXPECT_THAT(refused(c10::Device(c10::kCPU)), AllOf(HasSubstr("value 1: "), HasSubstr("Device")));
  EXPECT_THAT(refused(c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get())), HasSubstr("Future"));
  c10::Dict<at::Tensor, int64_t> keyed;
  keyed.insert(at::ones({1}), 1);
  EXPECT_THAT(refused(keyed), HasSubstr("key"));
  IValue deep(1);
  for (int i = 0; i < kMaxValueDepth + 1; ++i) deep = c10::ivalue::Tuple::create({deep});
  EXPECT_THAT(refused(deep), HasSubstr("deeper than 64"));
  c10::List<int64_t> many(std::vector<int64_t>(kMaxValues, 1));
  EXPECT_THAT(refused(many), HasSubstr("more than 1048576 values"));
}

// Bytes of a peer.

std::string MessageOf(Received received) {
  const absl::Status status = DecodeValues(received).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

Received Bytes(const std::function<void(base::ByteWriter&)>& write, std::vector<at::Tensor> tensors = {}) {
  base::ByteWriter out;
  write(out);
  Received received;
  received.body = std::move(out).Take();
  received.tensors = std::move(tensors);
  return received;
}

// Scenario rpc 48.
TEST(Values, EveryTruncationIsAnError) {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("k", at::ones({2}));
  auto payload = EncodeValues({IValue(dict), IValue(c10::List<int64_t>({1})), at::ones({2, 2}).to_sparse(),
                               c10::ivalue::Tuple::create({IValue("x"), IValue(0.5)})});
  ASSERT_TRUE(payload.ok());
  const Received whole = Arrived(*std::move(payload));
  ASSERT_TRUE(DecodeValues(whole).ok());
  for (size_t size = 0; size < whole.body.size(); ++size) {
    Received cut = whole;
    cut.body.resize(size);
    EXPECT_FALSE(DecodeValues(cut).ok()) << size;
  }
  Received more = whole;
  more.body += '\0';
  EXPECT_FALSE(DecodeValues(more).ok());
  Received fewer = whole;
  fewer.tensors.pop_back();
  EXPECT_FALSE(DecodeValues(fewer).ok());
}

// Scenarios rpc 48, users 146.
TEST(Values, NoByteThatIsFlippedHarms) {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("k", at::ones({2}));
  auto payload = EncodeValues(
      {IValue(dict), IValue(c10::List<int64_t>({1, 2})), at::ones({2, 2}).to_sparse_csr(), IValue(true)});
  ASSERT_TRUE(payload.ok());
  const Received whole = Arrived(*std::move(payload));
  for (size_t at = 0; at < whole.body.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      Received flipped = whole;
      flipped.body[at] = static_cast<char>(flipped.body[at] ^ (1 << bit));
      DecodeValues(flipped).status().IgnoreError();  // Any answer, but one.
    }
  }
}

// Scenario rpc 48.
TEST(Values, LyingCountsTypesAndIndicesAreErrors) {
  auto count = [](uint32_t n) { return Bytes([n](base::ByteWriter& out) { out.Put(n); }); };
  EXPECT_THAT(MessageOf(count(0xffffffff)), HasSubstr("a count above the bytes left"));
  EXPECT_THAT(MessageOf(Bytes([](base::ByteWriter& out) {
                out.Put<uint32_t>(kMaxValues + 1);
                for (size_t i = 0; i <= kMaxValues; ++i) out.Put<uint8_t>(0);
              })),
              HasSubstr("too many values"));
  EXPECT_THAT(MessageOf(Bytes([](base::ByteWriter& out) {
                out.Put<uint32_t>(1);
                out.Put<uint8_t>(99);
              })),
              HasSubstr("an unknown kind of value"));
  EXPECT_THAT(MessageOf(Bytes([](base::ByteWriter& out) {
                out.Put<uint32_t>(1);
                out.Put<uint8_t>(6);
                out.Put<uint32_t>(0);
              })),
              HasSubstr("a tensor that the message does not have"));
  // A list of int with a string in it.
  EXPECT_THAT(MessageOf(Bytes([](base::ByteWriter& out) {
                out.Put<uint32_t>(1);
                out.Put<uint8_t>(9);
                out.Put<uint8_t>(3);
                out.Put<uint32_t>(1);
                out.Put<uint8_t>(5);
                out.PutString("x");
              })),
              HasSubstr("not of its container's type"));
  // A dict with a key twice.
  EXPECT_THAT(MessageOf(Bytes([](base::ByteWriter& out) {
                out.Put<uint32_t>(1);
                out.Put<uint8_t>(10);
                out.Put<uint8_t>(3);
                out.Put<uint8_t>(3);
                out.Put<uint32_t>(2);
                for (int i = 0; i < 4; ++i) {
                  out.Put<uint8_t>(2);
                  out.Put<int64_t>(1);
                }
              })),
              HasSubstr("a key that comes twice"));
  // Nested without an end.
  EXPECT_THAT(MessageOf(Bytes([](base::ByteWriter& out) {
                out.Put<uint32_t>(1);
                for (int i = 0; i < 10000; ++i) {
                  out.Put<uint8_t>(11);
                  out.Put<uint32_t>(1);
                }
              })),
              HasSubstr("nested too deep"));
}

// Keys that all belong to one slot of the table that c10 makes of them, which doubles until it has room for them there.
TEST(Values, KeysThatAreMadeToCollideAreRefused) {
  uint64_t inverse = 1;  // Of the table's multiplier, modulo 2^64, by Newton's method.
  for (int i = 0; i < 6; ++i) inverse *= 2 - 11400714819323198485u * inverse;
  auto dict = [](const std::function<int64_t(int64_t)>& key, int count) {
    return Bytes([&](base::ByteWriter& out) {
      out.Put<uint32_t>(1);
      out.Put<uint8_t>(10);
      out.Put<uint8_t>(3);
      out.Put<uint8_t>(3);
      out.Put(static_cast<uint32_t>(count));
      for (int i = 0; i < count; ++i) {
        for (int64_t value : {key(i), int64_t{i}}) {
          out.Put<uint8_t>(2);
          out.Put(value);
        }
      }
    });
  };
  const auto colliding = [&](int64_t i) { return static_cast<int64_t>(inverse * static_cast<uint64_t>(i)); };
  EXPECT_THAT(MessageOf(dict(colliding, 40)), HasSubstr("made to collide"));
  // Honest ones pass, however many there are.
  for (int64_t step : {1, 2, 3, 8, 1000, 4096, 65536}) {
    const auto values = DecodeValues(dict([step](int64_t i) { return step * i; }, 5000));
    ASSERT_TRUE(values.ok()) << step << ": " << values.status();
    EXPECT_EQ((*values)[0].toGenericDict().size(), 5000u);
  }
}

TEST(Values, WhatChangesATensorDoesNotChangeASparseOneOfTheSameMessage) {
  const at::Tensor indices = at::tensor({0, 1, 1, 2}, at::kLong).view({2, 2});
  auto payload = EncodeValues({indices, at::sparse_coo_tensor(indices, at::ones({2}), {2, 3})});
  ASSERT_TRUE(payload.ok()) << payload.status();
  Received received = Arrived(*std::move(payload));
  received.tensors[1] = received.tensors[0];  // As a peer may say.
  auto values = DecodeValues(received);
  ASSERT_TRUE(values.ok()) << values.status();
  (*values)[0].toTensor().fill_(1 << 20);
  EXPECT_TRUE((*values)[1].toTensor()._indices().equal(indices));
}

TEST(Values, IndicesOutsideASparseTensorAreErrors) {
  auto coo = [](at::Tensor indices, at::Tensor values, bool coalesced) {
    return Bytes(
        [&](base::ByteWriter& out) {
          out.Put<uint32_t>(1);
          out.Put<uint8_t>(8);
          out.Put<uint8_t>(0);
          out.Put(coalesced);
          out.Put<uint8_t>(2);
          out.Put<int64_t>(2);
          out.Put<int64_t>(3);
          out.Put<uint32_t>(0);
          out.Put<uint32_t>(1);
        },
        {indices, values});
  };
  const at::Tensor good = at::tensor({0, 1, 1, 2}, at::kLong).view({2, 2});
  EXPECT_TRUE(DecodeValues(coo(good, at::ones({2}), false)).ok());
  EXPECT_TRUE(DecodeValues(coo(good, at::ones({2}), true)).ok());
  const at::Tensor outside = at::tensor({0, 2, 1, 2}, at::kLong).view({2, 2});
  const at::Tensor negative = at::tensor({0, 1, -1, 2}, at::kLong).view({2, 2});
  const at::Tensor twice = at::tensor({1, 1, 2, 2}, at::kLong).view({2, 2});
  for (const Received& wrong :
       {coo(outside, at::ones({2}), false), coo(negative, at::ones({2}), false),
        coo(good, at::ones({3}), false), coo(good.to(at::kFloat), at::ones({2}), false),
        coo(twice, at::ones({2}), true)}) {
    EXPECT_THAT(MessageOf(wrong), HasSubstr("a sparse tensor whose parts do not fit"));
  }
}

// Over the wire.

class ValuesOverTest : public AgentTest {};
INSTANTIATE_AGENT_TESTS(ValuesOverTest);

// Scenario users 23.
TEST_P(ValuesOverTest, TensorsOfEveryDtypeLayoutAndShape) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ASSERT_TRUE(b.Register({"values"}, [](ServerCall call) {
                 auto values = DecodeValues(call.request);
                 std::move(call.responder)
                     .Reply(values.ok() ? EncodeValues(*std::move(values))
                                        : absl::StatusOr<Payload>(values.status()));
               }).ok());
  using at::ScalarType;
  std::vector<at::Tensor> tensors;
  for (ScalarType type :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kComplexDouble, at::kBool,
        at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, ScalarType::Float8_e5m2,
        ScalarType::Float8_e4m3fn, ScalarType::UInt16, ScalarType::UInt32, ScalarType::UInt64}) {
    tensors.push_back(at::arange(1, 13, at::kFloat).to(type).view({3, 4}));
    tensors.push_back(at::arange(1, 13, at::kFloat).to(type).view({3, 4}).t());
    tensors.push_back(at::empty({0, 2}, type));
    tensors.push_back(at::ones({}, at::kFloat).to(type));
  }
  const at::Tensor complex = at::complex(at::rand({40, 50}, at::kDouble), at::rand({40, 50}, at::kDouble));
  tensors.push_back(complex.conj());
  tensors.push_back(at::imag(complex.conj()));  // Negated lazily.
  tensors.push_back(at::rand({300, 200}).narrow(1, 3, 40));
  std::vector<IValue> values;
  for (const at::Tensor& tensor : tensors) values.emplace_back(tensor);
  values.emplace_back(at::rand({100, 100}).to_sparse());
  values.emplace_back(at::rand({100, 100}).to_sparse_csr());
  auto payload = EncodeValues(values);
  ASSERT_TRUE(payload.ok()) << payload.status();
  auto reply = a.Call("b", {"values"}, *std::move(payload)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::StatusOr<std::vector<IValue>> back = DecodeValues(*reply);
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->size(), values.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor got = (*back)[i].toTensor();
    EXPECT_EQ(got.scalar_type(), tensors[i].scalar_type()) << i;
    EXPECT_EQ(got.sizes(), tensors[i].sizes()) << i;
    const at::Tensor plain = tensors[i].resolve_conj().resolve_neg().contiguous();
    if (plain.nbytes() == 0) continue;
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), plain.const_data_ptr(), plain.nbytes()), 0) << i;
  }
  for (size_t i = tensors.size(); i < values.size(); ++i) {
    EXPECT_TRUE((*back)[i].toTensor().to_dense().equal(values[i].toTensor().to_dense())) << i;
  }
}

}  // namespace
}  // namespace Atoll::rpc
