// Data sets of labelled images, whole in memory as bytes, and who takes which of them when: every worker
// computes the same shuffled order from (seed, epoch) and takes its own part of each batch, so that nothing
// about data travels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace Atoll::client {

/// Images and what they show. Immutable; the tensors may be shared between threads.
struct Dataset {
  at::Tensor images;  ///< uint8 [count, channels, height, width].
  at::Tensor labels;  ///< int64 [count], each in 0 .. classes - 1.
  int64_t size() const { return labels.defined() ? labels.size(0) : 0; }
};

struct Data {
  std::string name;
  Dataset train;
  Dataset test;
  int64_t classes = 10;
  double mean = 0;    ///< Of the training images' bytes; batches are (bytes - mean) / deviation.
  double stddev = 1;  ///< At least 1.
};

/// Where Debian's package dataset-fashion-mnist puts it.
inline constexpr char kFashionMnistFolder[] = "/usr/share/datasets/fashion-mnist";

/// Loads what --data names:
///   "fashion-mnist"    60,000 and 10,000 images of 28 x 28 from kFashionMnistFolder;
///   "synthetic[:N]"    N (default 2,048, at most 1,000,000) and N / 4 + 1 made-up images of 16 x 16 in 10
///                      classes, always the same ones;
///   a path (has '/')   a folder with the four IDX files of MNIST's family, gzipped (.gz) or plain:
///                      {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte.
/// Errors name the file and what is wrong with it: NotFound (no such folder or file; an unknown name lists
/// the known ones), DataLoss (truncated, damaged, trailing bytes), InvalidArgument (another magic number, no
/// or too many images, a label over 9, counts or sizes that do not agree).
absl::StatusOr<Data> LoadData(absl::string_view data);

/// One IDX file of images (magic 0x803: [count, rows, columns]) or of labels (0x801: [count]) as
/// uint8; gzipped or plain. Errors as of LoadData. At most 4 GiB, and never more memory than the file's size
/// can account for.
absl::StatusOr<at::Tensor> ReadIdxImages(const std::string& path);
absl::StatusOr<at::Tensor> ReadIdxLabels(const std::string& path);

/// The images of `indices` (int64) as floats around 0, and their labels.
struct Batch {
  at::Tensor images;  ///< float [n, channels, height, width].
  at::Tensor labels;  ///< int64 [n].
};
Batch TakeBatch(const Data& data, const Dataset& from, const at::Tensor& indices);

/// Which images each worker takes in one epoch. All are in the same number of steps, and every image is taken
/// once by one worker; the last step shares out evenly what is left (if fewer than `workers` are left they
/// sit this epoch out, so that nobody has an empty batch).
class EpochPlan {
 public:
  struct Options {
    int64_t count = 0;   ///< Images.
    int64_t batch = 64;  ///< Images a worker and step.
    int worker = 0;
    int workers = 1;
    uint64_t seed = 0;
    int64_t epoch = 0;
  };
  explicit EpochPlan(const Options& options);

  int64_t steps() const { return steps_; }
  /// Steps of any epoch with these options.
  static int64_t Steps(int64_t count, int64_t batch, int workers);
  /// This worker's images of step 0 .. steps() - 1: int64, at most `batch`, at least one.
  at::Tensor Indices(int64_t step) const;

 private:
  const Options options_;
  const int64_t steps_;
  std::vector<int64_t> order_;
};

}  // namespace Atoll::client
