// The built-in models that --model names: image classifiers small enough to train on CPUs. A user's own model
// needs none of this: any named parameters can be attached (trainer.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/client/data.h"
#include "atoll/client/trainer.h"

namespace Atoll::client {

/// What the data ask of a model.
struct ImageShape {
  int64_t channels = 1;
  int64_t height = 28;
  int64_t width = 28;
  int64_t classes = 10;
};
ImageShape ShapeOf(const Data& data);

/// Used from one thread.
class Model {
 public:
  virtual ~Model() = default;
  /// Logits [n, classes] of images, float [n, channels, height, width] of the shape it was made for.
  virtual at::Tensor Forward(const at::Tensor& images) = 0;
  /// In the order of the layers.
  virtual const NamedTensors& parameters() const = 0;
};

/// "convnet", "mlp", "linear".
std::vector<std::string> ModelNames();

/// Makes a model for images of `shape`, its values drawn from `seed` alone (the same in every process of one
/// install; no global random state is touched). NotFound lists the names; InvalidArgument says which shape
/// it needs.
///   convnet  two 3 x 3 convolutions (16, 32 channels) with pooling, 128 hidden: 206,922 parameters for
///            28 x 28; images of at least 4 x 4
///   mlp      128 hidden: 101,770 parameters for 28 x 28
///   linear   one layer: 7,850 parameters for 28 x 28
absl::StatusOr<std::unique_ptr<Model>> MakeModel(absl::string_view name, const ImageShape& shape,
                                                 uint64_t seed);

/// The share of images that `model` classifies rightly, without recording gradients.
double Accuracy(Model& model, const Data& data, const Dataset& on);

}  // namespace Atoll::client
