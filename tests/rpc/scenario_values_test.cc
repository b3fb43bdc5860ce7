// What arguments and results are where they arrive: docs/scenarios/rpc.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include "scenario_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using c10::IValue;
using ::testing::AllOf;
using ::testing::HasSubstr;

class ScenarioValuesTest : public ScenarioTest {
 protected:
  void SetUp() override {
    StartWorkers(2);
    ServeValues("echo.values", [](const ServerCall&, Values values) { return values; });
  }
  absl::StatusOr<Values> Echo(Values values, const std::string& to = "worker1") {
    return CallValues(&W(0), to, {"echo.values"}, std::move(values)).Wait(kHang);
  }
};
INSTANTIATE_AGENT_TESTS(ScenarioValuesTest);

// Scenario rpc 5.
TEST_P(ScenarioValuesTest, SparseTensorsAddThere) {
  const at::Tensor sparse = at::sparse_coo_tensor(at::tensor({0, 1, 1, 2, 0, 2}, at::kLong).view({2, 3}),
                                                  at::tensor({3.f, 4.f, 5.f}), {2, 3});
  const at::Tensor sum = Add(W(0), "worker1", sparse, sparse);
  ASSERT_EQ(sum.layout(), at::kSparse);
  EXPECT_EQ(sum.coalesce()._nnz(), 3);
  EXPECT_TRUE(sum.coalesce()._values().equal(at::tensor({6.f, 8.f, 10.f})));
  EXPECT_TRUE(sum.coalesce()._indices().equal(sparse._indices()));
}

// Scenario rpc 12. Ours: it arrives contiguous, and so does the answer.
TEST_P(ScenarioValuesTest, ANarrowedViewArrivesAsItsOwnValues) {
  const at::Tensor matrix = at::arange(25, at::kFloat).view({5, 5});
  const at::Tensor columns = matrix.narrow(1, 2, 2);
  ASSERT_FALSE(columns.is_contiguous());
  at::Tensor arrived;
  absl::Mutex mu;
  ServeValues("look", [&](const ServerCall&, Values values) {
    absl::MutexLock lock(&mu);
    arrived = values[0].toTensor().clone();
    EXPECT_TRUE(values[0].toTensor().is_contiguous());
    return values;
  });
  const at::Tensor back = TensorOf(CallValues(&W(0), "worker1", {"look"}, {columns}).Wait(kHang));
  const at::Tensor expected =
      at::tensor({2.f, 3.f, 7.f, 8.f, 12.f, 13.f, 17.f, 18.f, 22.f, 23.f}).view({5, 2});
  absl::MutexLock lock(&mu);
  EXPECT_TRUE(arrived.equal(expected));
  EXPECT_TRUE(back.equal(expected));
  EXPECT_EQ(back.strides(), (std::vector<int64_t>{2, 1}));
}

// Scenario rpc 13. Ours: always the view's own bytes, whatever share of its storage it is.
TEST_P(ScenarioValuesTest, OnlyTheBytesOfAViewTravel) {
  ServeValues("bytes", [](const ServerCall& call, Values values) {
    return Values{static_cast<int64_t>(call.request.tensors[0].storage().nbytes())};
  });
  std::vector<size_t> announced;
  absl::Mutex mu;
  MethodOptions options;
  options.allocate = [&](const base::MemberId&, absl::string_view,
                         absl::Span<const TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
    absl::MutexLock lock(&mu);
    announced.push_back(metas[0].bytes());
    return std::vector<at::Tensor>{at::empty(metas[0].sizes)};
  };
  ASSERT_TRUE(
      W(1).Register(
              {"announced"}, [](ServerCall call) { std::move(call.responder).Reply(Payload()); }, options)
          .ok());
  struct Case {
    at::Tensor view;
    int64_t bytes;
  };
  const at::Tensor square = at::ones({1000, 1000});
  for (const Case& view :
       {Case{at::ones({2048}).narrow(0, 512, 1024), 4096}, Case{at::ones({2048}).narrow(0, 0, 1025), 4100},
        Case{at::ones({4096}).narrow(0, 0, 2048), 8192}, Case{at::ones({2047}).narrow(0, 3, 100), 400},
        Case{square.select(0, 7), 4000}, Case{square.select(1, 7), 4000},
        Case{at::ones({1000}).narrow(0, 0, 600), 2400}, Case{at::ones({1000}).narrow(0, 600, 400), 1600}}) {
    auto storage = CallValues(&W(0), "worker1", {"bytes"}, {view.view}).Wait(kHang);
    ASSERT_TRUE(storage.ok()) << storage.status();
    EXPECT_EQ((*storage)[0].toInt(), view.bytes);
    Payload request;
    request.tensors.push_back(Copy(view.view));
    ASSERT_TRUE(W(0).Call("worker1", {"announced"}, std::move(request)).Wait(kHang).ok());
    absl::MutexLock lock(&mu);
    EXPECT_EQ(announced.back(), static_cast<size_t>(view.bytes));
  }
}

// Scenario rpc 14.
TEST_P(ScenarioValuesTest, ATensorGivenTwiceIsOneWhereItArrives) {
  ServeValues("alias", [](const ServerCall&, Values values) {
    values[0].toTensor().add_(1);
    return Values{values[0].toTensor().is_same(values[1].toTensor()), values[1]};
  });
  for (const char* to : {"worker1", "worker0"}) {
    for (int64_t count : {3, 1 << 17}) {  // In the header, and on its own.
      const at::Tensor twice = at::zeros({count});
      auto seen = CallValues(&W(0), to, {"alias"}, {twice, twice}).Wait(kHang);
      ASSERT_TRUE(seen.ok()) << seen.status();
      EXPECT_TRUE((*seen)[0].toBool());
      EXPECT_TRUE((*seen)[1].toTensor().equal(at::ones({count})));
      EXPECT_TRUE(twice.equal(at::zeros({count})));
    }
  }
}

// Scenario rpc 15. Whatever a handler does to its request, and however the tensor was given.
TEST_P(ScenarioValuesTest, WhatTheCalleeWritesTheCallerDoesNotSee) {
  for (Agent* agent : workers_) {
    ASSERT_TRUE(agent
                    ->Register({"increment"},
                               [](ServerCall call) {
                                 Payload reply;
                                 reply.tensors.push_back(Copy(call.request.tensors[0].add_(1)));
                                 std::move(call.responder).Reply(std::move(reply));
                               })
                    .ok());
  }
  for (const char* to : {"worker1", "worker0"}) {
    for (int64_t count : {2, 1 << 17}) {
      for (bool lent : {false, true}) {
        const at::Tensor mine = at::zeros({count});
        Payload request;
        request.tensors.push_back(lent ? Lend(mine) : Copy(mine));
        auto reply = W(0).Call(to, {"increment"}, std::move(request)).Wait(kHang);
        ASSERT_TRUE(reply.ok()) << reply.status();
        EXPECT_TRUE(reply->tensors[0].equal(at::ones({count})));
        EXPECT_TRUE(mine.equal(at::zeros({count})));
      }
      const at::Tensor value = at::zeros({count});
      EXPECT_TRUE(TensorOf(CallOperator(&W(0), to, {"aten::add_.Scalar", {value, 1}}).Wait(kHang))
                      .equal(at::ones({count})));
      EXPECT_TRUE(value.equal(at::zeros({count})));
    }
  }
}

// Scenario rpc 19.
TEST_P(ScenarioValuesTest, AFutureIsNoValue) {
  const IValue future(c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get()));
  const absl::Status argument = Echo({future}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(argument)) << argument;
  EXPECT_THAT(Text(argument), AllOf(HasSubstr("value 0: a Future does not travel"), HasSubstr("on worker1")));
  EXPECT_EQ(GetRan(argument), Ran::kNo);
  ServeValues("promise", [future](const ServerCall&, const Values&) { return Values{1, future}; });
  for (const char* to : {"worker1", "worker0"}) {
    const absl::Status result = CallValues(&W(0), to, {"promise"}, {}).Wait(kHang).status();
    EXPECT_TRUE(absl::IsInvalidArgument(result)) << result;
    EXPECT_THAT(Text(result), HasSubstr("value 1: a Future does not travel"));
    EXPECT_EQ(GetRan(result), Ran::kYes);
  }
}

// Scenario rpc 47. Memory that its tensor does not own is its maker's again once the call has been made: also of the
// first call, whose message waits for a connection.
TEST_P(ScenarioValuesTest, ForeignMemoryIsFreeWhenTheCallHasBeenMade) {
  ServeValues("sum", [](const ServerCall&, Values values) { return Values{values[0].toTensor().sum()}; });
  ASSERT_TRUE(W(1).Register({"sum.plain"},
                            [](ServerCall call) {
                              Payload reply;
                              reply.tensors.push_back(Copy(call.request.tensors[0].sum()));
                              std::move(call.responder).Reply(std::move(reply));
                            })
                  .ok());
  const int64_t count = 1 << 18;
  if (fake()) network_->SetUnreachable("the network is not there yet");
  std::vector<float> memory(count, 1.0f);
  Values values;
  values.emplace_back(at::from_blob(memory.data(), {count}));  // Nobody else holds it.
  auto moved = CallValues(&W(0), "worker1", {"sum"}, std::move(values));
  std::fill(memory.begin(), memory.end(), 2.0f);
  Payload request;
  request.tensors.push_back(Copy(at::from_blob(memory.data(), {count})));
  auto copied = W(0).Call("worker1", {"sum.plain"}, std::move(request));
  std::fill(memory.begin(), memory.end(), -1.0f);
  memory = std::vector<float>();
  if (fake()) network_->SetUnreachable("");
  EXPECT_EQ(TensorOf(moved.Wait(kHang)).item<float>(), static_cast<float>(count));
  absl::StatusOr<Received> sum = copied.Wait(kHang);
  ASSERT_TRUE(sum.ok()) << sum.status();
  EXPECT_EQ(sum->tensors[0].item<float>(), 2.0f * static_cast<float>(count));
}

// Scenario rpc 48.
TEST_P(ScenarioValuesTest, EmptyOnesAndThoseThatRecordGradientsComeBack) {
  for (const char* to : {"worker1", "worker0"}) {
    absl::StatusOr<Values> nothing = Echo({}, to);
    ASSERT_TRUE(nothing.ok()) << nothing.status();
    EXPECT_TRUE(nothing->empty());
    ASSERT_TRUE(W(0).Call(to, {"echo.values"}, Body(std::string(4, '\0'))).Wait(kHang).ok());
    const at::Tensor leaf = at::full({2, 2}, 3.0f).requires_grad_(true);
    const at::Tensor base = at::rand({6});
    const at::Tensor of_views = at::sparse_coo_tensor(at::arange(12, at::kLong).view({2, 6}).narrow(1, 2, 3),
                                                      base.narrow(0, 1, 3), {12, 12});
    absl::StatusOr<Values> back = Echo(
        {IValue(c10::List<at::Tensor>()), leaf, leaf.mul(2), of_views, at::zeros({0, 3}), at::full({}, 7)},
        to);
    ASSERT_TRUE(back.ok()) << back.status();
    ASSERT_EQ(back->size(), 6u);
    EXPECT_TRUE((*back)[0].isTensorList());
    EXPECT_TRUE((*back)[0].toTensorVector().empty());
    EXPECT_TRUE((*back)[1].toTensor().equal(leaf));
    EXPECT_FALSE((*back)[1].toTensor().requires_grad());  // That is the affair of autograd across processes.
    EXPECT_TRUE((*back)[2].toTensor().equal(at::full({2, 2}, 6.0f)));
    EXPECT_TRUE((*back)[3].toTensor().to_dense().equal(of_views.to_dense()));
    EXPECT_EQ((*back)[4].toTensor().sizes(), (std::vector<int64_t>{0, 3}));
    EXPECT_EQ((*back)[5].toTensor().dim(), 0);
    EXPECT_EQ((*back)[5].toTensor().item<int64_t>(), 7);
  }
}

}  // namespace
}  // namespace Atoll::rpc
