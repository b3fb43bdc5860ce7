#include "atoll/client/models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace Atoll::client {
namespace {

using ::testing::HasSubstr;

int64_t CountParameters(const Model& model) {
  int64_t count = 0;
  for (const auto& [name, tensor] : model.parameters().items()) count += tensor.numel();
  return count;
}

bool SameValues(const Model& a, const Model& b) {
  const NamedTensors x = a.parameters(), y = b.parameters();
  if (x.items().size() != y.items().size()) return false;
  for (size_t i = 0; i < x.items().size(); ++i) {
    if (x.items()[i].first != y.items()[i].first) return false;
    if (!at::equal(x.items()[i].second, y.items()[i].second)) return false;
  }
  return true;
}

TEST(ModelsTest, SizesAreAsDocumented) {
  const std::map<std::string, int64_t> expected = {{"convnet", 206922}, {"mlp", 101770}, {"linear", 7850}};
  ASSERT_EQ(ModelNames().size(), expected.size());
  for (const std::string& name : ModelNames()) {
    auto model = MakeModel(name, {}, 1);
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ(CountParameters(**model), expected.at(name)) << name;
    EXPECT_EQ((*model)->Forward(at::zeros({3, 1, 28, 28})).sizes(), (std::vector<int64_t>{3, 10}));
  }
}

TEST(ModelsTest, ValuesComeFromTheSeedAloneAndLeaveGlobalRandomnessAlone) {
  torch::manual_seed(7);
  const at::Tensor expected = torch::rand({4});
  for (const std::string& name : ModelNames()) {
    auto a = MakeModel(name, {}, 1);
    torch::rand({100});
    auto b = MakeModel(name, {}, 1);
    auto c = MakeModel(name, {}, 2);
    EXPECT_TRUE(SameValues(**a, **b)) << name;
    EXPECT_FALSE(SameValues(**a, **c)) << name;
  }
  torch::manual_seed(7);
  MakeModel("convnet", {}, 1).IgnoreError();
  EXPECT_TRUE(at::equal(torch::rand({4}), expected));
}

TEST(ModelsTest, RefusesUnknownNamesAndShapes) {
  const absl::Status unknown = MakeModel("resnet", {}, 1).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("convnet, mlp, linear"));
  const absl::Status small = MakeModel("convnet", {1, 3, 28, 10}, 1).status();
  EXPECT_EQ(small.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(small.message()), HasSubstr("at least 4 x 4, but these are 3 x 28"));
  EXPECT_EQ(MakeModel("mlp", {1, 1 << 20, 28, 10}, 1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ModelsTest, EveryModelLearnsTheSyntheticData) {
  const auto data = LoadData("synthetic:1000");
  ASSERT_TRUE(data.ok());
  at::set_num_threads(1);
  for (const std::string& name : ModelNames()) {
    auto model = MakeModel(name, ShapeOf(*data), 1);
    ASSERT_TRUE(model.ok());
    const double before = Accuracy(**model, *data, data->test);
    std::vector<at::Tensor> parameters;
    for (const auto& [_, tensor] : (*model)->parameters().items()) parameters.push_back(tensor);
    torch::optim::Adam adam(parameters, torch::optim::AdamOptions(2e-3));
    for (int64_t epoch = 0; epoch < 6; ++epoch) {
      const EpochPlan plan({.count = data->train.size(), .batch = 32, .seed = 1, .epoch = epoch});
      for (int64_t step = 0; step < plan.steps(); ++step) {
        const Batch batch = TakeBatch(*data, data->train, plan.Indices(step));
        adam.zero_grad();
        torch::cross_entropy_loss((*model)->Forward(batch.images), batch.labels).backward();
        adam.step();
      }
    }
    const double after = Accuracy(**model, *data, data->test);
    EXPECT_LT(before, 0.5) << name;
    EXPECT_GT(after, 0.9) << name;
  }
}

}  // namespace
}  // namespace Atoll::client
