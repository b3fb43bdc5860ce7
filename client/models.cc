#include "atoll/client/models.h"

#include <algorithm>
#include <cmath>

#include <torch/torch.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/rpc/exception_text.h"

namespace Atoll::client {
namespace {

namespace nn = torch::nn;

/// LibTorch's layers draw their first values from the process's default generator, which is the user's.
class KeepDefaultRandomness {
 public:
  KeepDefaultRandomness() : state_(at::detail::getDefaultCPUGenerator().get_state()) {}
  ~KeepDefaultRandomness() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(state_);
  }
  KeepDefaultRandomness(const KeepDefaultRandomness&) = delete;
  KeepDefaultRandomness& operator=(const KeepDefaultRandomness&) = delete;

 private:
  const at::Tensor state_;
};

/// A Sequential of layers whose values are drawn anew.
class SequentialModel : public Model {
 public:
  SequentialModel(nn::Sequential layers, uint64_t seed)
      : layers_(std::move(layers)), parameters_(layers_->named_parameters()) {
    // PyTorch's default initialization (uniform within 1 / sqrt(fan in)), but from a generator of our own.
    at::Generator generator = at::detail::createCPUGenerator(seed);
    torch::NoGradGuard no_grad;
    for (const auto& layer : layers_->children()) {
      at::Tensor weight, bias;
      if (auto* linear = layer->as<nn::Linear>()) {
        weight = linear->weight, bias = linear->bias;
      } else if (auto* conv = layer->as<nn::Conv2d>()) {
        weight = conv->weight, bias = conv->bias;
      } else {
        continue;
      }
      const double bound = 1.0 / std::sqrt(static_cast<double>(weight[0].numel()));
      weight.uniform_(-bound, bound, generator);
      bias.uniform_(-bound, bound, generator);
    }
  }
  at::Tensor Forward(const at::Tensor& images) override { return layers_->forward(images); }
  const NamedTensors& parameters() const override { return parameters_; }

 private:
  nn::Sequential layers_;
  NamedTensors parameters_;
};

nn::Sequential ConvNet(const ImageShape& shape) {
  const int64_t left = (shape.height / 4) * (shape.width / 4);
  return nn::Sequential(
      {{"conv1", nn::AnyModule(nn::Conv2d(nn::Conv2dOptions(shape.channels, 16, 3).padding(1)))},
       {"pool1", nn::AnyModule(nn::MaxPool2d(2))},
       {"relu1", nn::AnyModule(nn::ReLU())},
       {"conv2", nn::AnyModule(nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)))},
       {"pool2", nn::AnyModule(nn::MaxPool2d(2))},
       {"relu2", nn::AnyModule(nn::ReLU())},
       {"flatten", nn::AnyModule(nn::Flatten())},
       {"hidden", nn::AnyModule(nn::Linear(32 * left, 128))},
       {"relu3", nn::AnyModule(nn::ReLU())},
       {"output", nn::AnyModule(nn::Linear(128, shape.classes))}});
}

nn::Sequential Mlp(const ImageShape& shape) {
  return nn::Sequential(
      {{"flatten", nn::AnyModule(nn::Flatten())},
       {"hidden", nn::AnyModule(nn::Linear(shape.channels * shape.height * shape.width, 128))},
       {"relu", nn::AnyModule(nn::ReLU())},
       {"output", nn::AnyModule(nn::Linear(128, shape.classes))}});
}

nn::Sequential Linear(const ImageShape& shape) {
  return nn::Sequential(
      {{"flatten", nn::AnyModule(nn::Flatten())},
       {"output", nn::AnyModule(nn::Linear(shape.channels * shape.height * shape.width, shape.classes))}});
}

struct Entry {
  const char* name;
  nn::Sequential (*make)(const ImageShape&);
  int64_t min_side;
};
constexpr Entry kModels[] = {{"convnet", ConvNet, 4}, {"mlp", Mlp, 1}, {"linear", Linear, 1}};

}  // namespace

ImageShape ShapeOf(const Data& data) {
  const at::Tensor& images = data.train.images;
  return {images.size(1), images.size(2), images.size(3), data.classes};
}

std::vector<std::string> ModelNames() {
  std::vector<std::string> names;
  for (const Entry& entry : kModels) names.emplace_back(entry.name);
  return names;
}

absl::StatusOr<std::unique_ptr<Model>> MakeModel(absl::string_view name, const ImageShape& shape,
                                                 uint64_t seed) {
  for (const Entry& entry : kModels) {
    if (name != entry.name) continue;
    if (shape.height < entry.min_side || shape.width < entry.min_side) {
      return absl::InvalidArgumentError(absl::StrCat("the model ", name, " needs images of at least ",
                                                     entry.min_side, " x ", entry.min_side,
                                                     ", but these are ", shape.height, " x ", shape.width));
    }
    if (shape.channels < 1 || shape.classes < 2 || shape.channels > 1024 || shape.classes > (1 << 20) ||
        shape.height > (1 << 14) || shape.width > (1 << 14)) {
      return absl::InvalidArgumentError(absl::StrCat("the model ", name, " cannot be made for ",
                                                     shape.channels, " x ", shape.height, " x ", shape.width,
                                                     " images in ", shape.classes, " classes"));
    }
    try {
      KeepDefaultRandomness keep;
      return std::make_unique<SequentialModel>(entry.make(shape), seed);
    } catch (...) {  // Out of memory, in LibTorch's words.
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot make the model ", name, ": ", rpc::ExceptionText()));
    }
  }
  return absl::NotFoundError(
      absl::StrCat("there is no model '", name, "': known are ", absl::StrJoin(ModelNames(), ", ")));
}

double Accuracy(Model& model, const Data& data, const Dataset& on) {
  constexpr int64_t kPart = 500;
  torch::NoGradGuard no_grad;
  int64_t right = 0;
  for (int64_t begin = 0; begin < on.size(); begin += kPart) {
    const Batch batch = TakeBatch(data, on, at::arange(begin, std::min(on.size(), begin + kPart), at::kLong));
    right += model.Forward(batch.images).argmax(1).eq(batch.labels).sum().item<int64_t>();
  }
  return on.size() == 0 ? 0.0 : static_cast<double>(right) / static_cast<double>(on.size());
}

}  // namespace Atoll::client
