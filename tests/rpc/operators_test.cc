// Operators and scripts: what is named, not sent.
#include "atoll/rpc/operators.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include <ATen/ops/tensor.h>
#include <torch/csrc/jit/api/module.h>

#include "agent_fixture.h"
#include "atoll/rpc/script.h"

namespace Atoll::rpc {
namespace {

using c10::IValue;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class OperatorsTest : public AgentTest {
 protected:
  void SetUp() override {
    a_ = &Start("a");
    b_ = &Start("b");
    Introduce(*a_, *b_);
  }
  absl::StatusOr<std::vector<IValue>> Call(const char* to, std::string name, std::vector<IValue> arguments,
                                           std::vector<std::pair<std::string, IValue>> keywords = {}) {
    return CallOperator(a_, to, {std::move(name), std::move(arguments), std::move(keywords)}).Wait(kHang);
  }
  void ExpectError(const absl::StatusOr<std::vector<IValue>>& result, absl::StatusCode code,
                   const std::string& text) {
    EXPECT_EQ(result.status().code(), code) << result.status();
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(text));
  }

  Agent* a_ = nullptr;
  Agent* b_ = nullptr;
};
INSTANTIATE_AGENT_TESTS(OperatorsTest);

// Scenario rpc 1.
TEST_P(OperatorsTest, RunByNameHereAndThere) {
  ASSERT_TRUE(ServeOperators(a_).ok());
  ASSERT_TRUE(ServeOperators(b_).ok());
  for (const char* to : {"a", "b"}) {
    for (const char* name : {"aten::add.Tensor", "aten::add"}) {
      auto sum = Call(to, name, {at::ones({2, 2}), at::ones({2, 2})});
      ASSERT_TRUE(sum.ok()) << sum.status();
      ASSERT_EQ(sum->size(), 1u);
      EXPECT_TRUE((*sum)[0].toTensor().equal(at::full({2, 2}, 2.0)));
    }
    auto scalar = Call(to, "aten::add.Scalar", {at::ones({2, 2}), 1});
    ASSERT_TRUE(scalar.ok()) << scalar.status();
    EXPECT_TRUE((*scalar)[0].toTensor().equal(at::full({2, 2}, 2.0)));
    auto scaled = Call(to, "aten::add", {at::ones({2}), at::ones({2})}, {{"alpha", 3}});
    ASSERT_TRUE(scaled.ok()) << scaled.status();
    EXPECT_TRUE((*scaled)[0].toTensor().equal(at::full({2}, 4.0)));
    auto both = Call(to, "aten::topk", {at::arange(5, at::kFloat), 2});
    ASSERT_TRUE(both.ok()) << both.status();
    ASSERT_EQ(both->size(), 2u);
    EXPECT_TRUE((*both)[0].toTensor().equal(at::tensor({4.f, 3.f})));
    auto cat = Call(to, "aten::cat", {IValue(c10::List<at::Tensor>({at::ones({1}), at::zeros({1})}))});
    ASSERT_TRUE(cat.ok()) << cat.status();
    EXPECT_EQ((*cat)[0].toTensor().numel(), 2);
    auto item = Call(to, "aten::size.int", {at::ones({2, 7}), 1});
    ASSERT_TRUE(item.ok()) << item.status();
    EXPECT_EQ((*item)[0].toInt(), 7);
  }
}

// Scenario rpc 15.
TEST_P(OperatorsTest, TheCallersTensorIsItsOwn) {
  ASSERT_TRUE(ServeOperators(a_).ok());
  ASSERT_TRUE(ServeOperators(b_).ok());
  for (const char* to : {"a", "b"}) {
    at::Tensor mine = at::zeros({2});
    auto added = Call(to, "aten::add_.Scalar", {mine, 1});
    ASSERT_TRUE(added.ok()) << added.status();
    EXPECT_TRUE((*added)[0].toTensor().equal(at::ones({2})));
    EXPECT_TRUE(mine.equal(at::zeros({2})));
  }
}

// Scenario rpc 8.
TEST_P(OperatorsTest, ErrorsAreTheOperatorsOwn) {
  ASSERT_TRUE(ServeOperators(b_).ok());
  ExpectError(Call("b", "aten::add.Tensor", {at::ones({10}), at::ones({5})}), absl::StatusCode::kInternal,
              "The size of tensor a (10) must match the size of tensor b (5) at non-singleton dimension 0");
  ExpectError(Call("b", "aten::no_such", {}), absl::StatusCode::kNotFound,
              "there is no operator aten::no_such");
  ExpectError(Call("b", "aten::add.NoSuch", {}), absl::StatusCode::kNotFound, "aten::add.NoSuch");
  ExpectError(Call("b", "aten::add.Tensor", {at::ones({1})}), absl::StatusCode::kInvalidArgument,
              "aten::add");
  ExpectError(Call("b", "aten::add.Tensor", {at::ones({1}), "text"}), absl::StatusCode::kInvalidArgument,
              "Tensor");
  ExpectError(Call("b", "aten::relu", {at::ones({1})}, {{"no_such", 1}}), absl::StatusCode::kInvalidArgument,
              "no_such");
  ExpectError(Call("b", "aten::empty.memory_format", {IValue(c10::List<int64_t>({int64_t{1} << 60}))}),
              absl::StatusCode::kInternal, "");
}

TEST_P(OperatorsTest, CodesOutsideTheirTablesAreErrors) {
  ASSERT_TRUE(ServeOperators(b_).ok());
  const IValue size(c10::List<int64_t>({2}));
  for (const char* keyword : {"dtype", "layout", "memory_format"}) {
    for (int64_t code : {int64_t{-1}, int64_t{1000}, int64_t{1} << 40}) {
      ExpectError(Call("b", "aten::empty.memory_format", {size}, {{keyword, code}}),
                  absl::StatusCode::kInvalidArgument, absl::StrCat("the argument '", keyword, "' is no "));
    }
  }
  auto whole = Call("b", "aten::empty.memory_format", {size}, {{"dtype", static_cast<int64_t>(at::kDouble)}});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ((*whole)[0].toTensor().scalar_type(), at::kDouble);
}

// Scenario users 146.
TEST_P(OperatorsTest, OnlyWhatTheRuleAllows) {
  ExpectError(Call("b", "aten::relu", {at::ones({1})}), absl::StatusCode::kNotFound,
              "it serves no method torch.operator v1");
  ASSERT_TRUE(ServeOperators(b_, {{"aten::relu", "aten::add.*", "aten::from_file"}}).ok());
  EXPECT_TRUE(Call("b", "aten::relu", {at::ones({1})}).ok());
  EXPECT_TRUE(Call("b", "aten::add.Scalar", {at::ones({1}), 1}).ok());
  EXPECT_TRUE(Call("b", "aten::add", {at::ones({1}), at::ones({1})}).ok());
  ExpectError(Call("b", "aten::mul.Tensor", {at::ones({1}), at::ones({1})}),
              absl::StatusCode::kPermissionDenied, "aten::mul.Tensor is not allowed here");
  // Whatever the rule says: nothing that names a file.
  ExpectError(Call("b", "aten::from_file", {"/etc/passwd", false, 16}), absl::StatusCode::kPermissionDenied,
              "names a file");
  EXPECT_TRUE(absl::IsAlreadyExists(ServeOperators(b_)));
  // "aten::*" is what is for users. What believes its arguments must be named.
  ASSERT_TRUE(ServeOperators(a_).ok());
  const at::Tensor compressed = at::tensor({0, 1, 2}, at::kLong), plain = at::tensor({0, 1}, at::kLong);
  for (const char* name : {"aten::_convert_indices_from_csr_to_coo", "aten::_sparse_coo_tensor_unsafe"}) {
    ExpectError(Call("a", name, {compressed, plain}), absl::StatusCode::kPermissionDenied,
                "is not allowed here");
  }
  for (const char* wrong : {"", "relu", "aten::", "::relu", "aten"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ServeOperators(a_, {{wrong}}))) << wrong;
  }
}

// Scripts.

class ScriptTest : public OperatorsTest {
 protected:
  void SetUp() override {
    OperatorsTest::SetUp();
    auto served = ScriptModules::Serve(b_);
    ASSERT_TRUE(served.ok()) << served.status();
    modules_ = *served;
  }
  static torch::jit::Module Scaler(double factor) {
    torch::jit::Module module("Scaler");
    module.register_parameter("weight", at::full({}, factor), /*is_buffer=*/true);
    module.define(R"(
      def forward(self, x):
        return x * self.weight
      def named(self, x: Dict[str, Tensor], times: int) -> Tuple[Tensor, int]:
        return x["x"] * times, times
      def fails(self, x: Tensor) -> Tensor:
        assert x.numel() < 0, "this module is out of order"
        return x
    )");
    return module;
  }
  absl::StatusOr<std::vector<IValue>> Script(ScriptCall call) {
    return CallScript(a_, "b", std::move(call)).Wait(kHang);
  }

  std::shared_ptr<ScriptModules> modules_;
};
INSTANTIATE_AGENT_TESTS(ScriptTest);

// Scenario users 146.
TEST_P(ScriptTest, RunsWhatTheCalleeHas) {
  ASSERT_TRUE(modules_->Add("scaler", Scaler(3)).ok());
  auto scaled = Script({"scaler", "forward", {at::ones({2})}});
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  EXPECT_TRUE((*scaled)[0].toTensor().equal(at::full({2}, 3.0)));
  c10::Dict<std::string, at::Tensor> named;
  named.insert("x", at::ones({2}));
  auto both = Script({"scaler", "named", {named, 5}});
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_EQ((*both)[0].toTupleRef().elements()[1].toInt(), 5);
  ASSERT_TRUE(modules_->Add("scaler", Scaler(4)).ok());  // Instead of the earlier one.
  EXPECT_TRUE((*Script({"scaler", "forward", {at::ones({2})}}))[0].toTensor().equal(at::full({2}, 4.0)));
  EXPECT_THAT(modules_->names(), ElementsAre("scaler"));
  EXPECT_TRUE(modules_->Remove("scaler"));
  EXPECT_FALSE(modules_->Remove("scaler"));
  ExpectError(Script({"scaler", "forward", {}}), absl::StatusCode::kNotFound, "it serves no module 'scaler'");
}

TEST_P(ScriptTest, ErrorsNameWhatThereIs) {
  ASSERT_TRUE(modules_->Add("scaler", Scaler(3)).ok());
  ExpectError(Script({"other", "forward", {}}), absl::StatusCode::kNotFound,
              "it serves no module 'other'; it serves scaler");
  ExpectError(Script({"scaler", "backward", {}}), absl::StatusCode::kNotFound,
              "it has forward, named, fails");
  ExpectError(Script({"scaler", "forward", {at::ones({1}), 2}}), absl::StatusCode::kInvalidArgument,
              "forward");
  ExpectError(Script({"scaler", "named", {at::ones({1}), 2}}), absl::StatusCode::kInvalidArgument, "Dict");
  ExpectError(Script({"scaler", "fails", {at::ones({1})}}), absl::StatusCode::kInternal,
              "this module is out of order");
  EXPECT_TRUE(absl::IsInvalidArgument(modules_->Add("", Scaler(1))));
  EXPECT_TRUE(absl::IsInvalidArgument(modules_->Add(std::string(129, 'x'), Scaler(1))));
}

TEST_P(ScriptTest, LoadsWhatWasSavedAndRefusesTheRest) {
  char folder[] = "/tmp/atoll-script-XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = absl::StrCat(folder, "/scaler.pt"), junk = absl::StrCat(folder, "/junk.pt");
  Scaler(2).save(path);
  std::ofstream(junk) << "no archive";
  EXPECT_TRUE(modules_->Load("scaler", path).ok());
  EXPECT_TRUE((*Script({"scaler", "forward", {at::ones({2})}}))[0].toTensor().equal(at::full({2}, 2.0)));
  const absl::Status missing = modules_->Load("x", absl::StrCat(folder, "/none.pt"));
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
  const absl::Status wrong = modules_->Load("x", junk);
  EXPECT_TRUE(absl::IsInvalidArgument(wrong)) << wrong;
  EXPECT_THAT(std::string(wrong.message()),
              AllOf(HasSubstr("junk.pt is no TorchScript module"), Not(HasSubstr("\n"))));
  std::remove(path.c_str());
  std::remove(junk.c_str());
  rmdir(folder);
}

}  // namespace
}  // namespace Atoll::rpc
