#include "atoll/client/data.h"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <random>

#include <ATen/Functions.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"

namespace Atoll::client {
namespace {

constexpr uint32_t kImageMagic = 0x803;
constexpr uint32_t kLabelMagic = 0x801;
constexpr uint64_t kMaxBytes = uint64_t{4} << 30;
constexpr uint64_t kMaxInflation = 1032;  // Deflate's best: 258 bytes in 2 bits.

uint32_t BigEndian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

/// A file that zlib inflates, or passes through if it is not gzipped.
class InputFile {
 public:
  static absl::StatusOr<std::unique_ptr<InputFile>> Open(const std::string& path) {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) return base::ErrnoStatus(errno, absl::StrCat("cannot read ", path));
    if (!S_ISREG(info.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a file"));
    gzFile file = gzopen(path.c_str(), "rbe");
    if (file == nullptr) return base::ErrnoStatus(errno, absl::StrCat("cannot read ", path));
    gzbuffer(file, 1 << 18);
    return std::unique_ptr<InputFile>(new InputFile(path, file, static_cast<uint64_t>(info.st_size)));
  }
  ~InputFile() { gzclose(file_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  /// More than this cannot come out of it.
  uint64_t most_bytes() const { return gzdirect(file_) ? size_ : size_ * kMaxInflation; }

  /// Exactly `size` bytes, or DataLoss.
  absl::Status Read(void* to, uint64_t size, absl::string_view what) {
    uint8_t* p = static_cast<uint8_t*>(to);
    uint64_t done = 0;
    while (done < size) {
      const auto part = static_cast<unsigned>(std::min<uint64_t>(size - done, 1 << 30));
      const int got = gzread(file_, p + done, part);
      if (got < 0) return Damaged();
      if (got == 0) {
        int code = 0;
        gzerror(file_, &code);
        return absl::DataLossError(absl::StrCat(path_, " is truncated: its ", what, " should have ", size,
                                                " bytes, but the file ends after ", done,
                                                code == Z_BUF_ERROR ? " (inside the gzip stream)" : ""));
      }
      done += static_cast<uint64_t>(got);
    }
    return absl::OkStatus();
  }
  absl::Status ExpectEnd(uint64_t expected) {
    char extra;
    const int got = gzread(file_, &extra, 1);
    if (got < 0) return Damaged();
    if (got > 0) {
      return absl::DataLossError(absl::StrCat(path_, " has bytes after its end: its header says ", expected,
                                              " bytes of data, and there are more"));
    }
    int code = 0;
    gzerror(file_, &code);
    if (code == Z_BUF_ERROR) {
      return absl::DataLossError(absl::StrCat(path_, " is truncated: its gzip stream has no end"));
    }
    return absl::OkStatus();
  }

 private:
  InputFile(std::string path, gzFile file, uint64_t size)
      : path_(std::move(path)), file_(file), size_(size) {}
  absl::Status Damaged() {
    int code = 0;
    const char* text = gzerror(file_, &code);
    if (code == Z_ERRNO) return base::ErrnoStatus(errno, absl::StrCat("cannot read ", path_));
    return absl::DataLossError(absl::StrCat(path_, " is damaged: ", text));
  }

  const std::string path_;
  const gzFile file_;
  const uint64_t size_;
};

/// Header and data of an IDX file of bytes with `dims` dimensions.
absl::StatusOr<at::Tensor> ReadIdx(const std::string& path, uint32_t magic, size_t dims,
                                   absl::string_view what) {
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<InputFile> file, InputFile::Open(path));
  uint8_t header[16];
  ATOLL_RETURN_IF_ERROR(file->Read(header, 4 + 4 * dims, "IDX header"));
  if (BigEndian(header) != magic) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is no IDX file of ", what, ": it starts with 0x",
                                                   absl::Hex(BigEndian(header), absl::kZeroPad8),
                                                   ", not with 0x", absl::Hex(magic, absl::kZeroPad8)));
  }
  std::vector<int64_t> sizes;
  uint64_t bytes = 1;
  for (size_t i = 0; i < dims; ++i) {
    const uint32_t size = BigEndian(header + 4 + 4 * i);
    sizes.push_back(size);
    if (size == 0) return absl::InvalidArgumentError(absl::StrCat(path, " holds no ", what));
    if (bytes > kMaxBytes / size) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": its header says more than ", kMaxBytes,
                                                     " bytes of ", what, ", which is more than is read"));
    }
    bytes *= size;
  }
  if (bytes > file->most_bytes()) {
    return absl::DataLossError(absl::StrCat(path, " is truncated: its header says ", bytes, " bytes of ",
                                            what, ", more than the file can hold"));
  }
  at::Tensor tensor;
  try {
    tensor = at::empty(sizes, at::kByte);
  } catch (const std::exception& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, ": no memory for its ", bytes, " bytes of ", what));
  }
  ATOLL_RETURN_IF_ERROR(file->Read(tensor.data_ptr<uint8_t>(), bytes, what));
  ATOLL_RETURN_IF_ERROR(file->ExpectEnd(bytes));
  return tensor;
}

/// The gzipped file if it is there, else the plain one.
absl::StatusOr<std::string> FindFile(const std::string& folder, absl::string_view name) {
  std::string gzipped = absl::StrCat(folder, "/", name, ".gz");
  std::string plain = absl::StrCat(folder, "/", name);
  struct stat info;
  if (stat(gzipped.c_str(), &info) == 0) return gzipped;
  if (stat(plain.c_str(), &info) == 0) return plain;
  return absl::NotFoundError(absl::StrCat("neither ", gzipped, " nor ", plain, " is there"));
}

absl::StatusOr<Dataset> LoadIdxPair(const std::string& folder, absl::string_view part, int64_t classes) {
  ATOLL_ASSIGN_OR_RETURN(std::string images_path, FindFile(folder, absl::StrCat(part, "-images-idx3-ubyte")));
  ATOLL_ASSIGN_OR_RETURN(std::string labels_path, FindFile(folder, absl::StrCat(part, "-labels-idx1-ubyte")));
  ATOLL_ASSIGN_OR_RETURN(at::Tensor images, ReadIdxImages(images_path));
  ATOLL_ASSIGN_OR_RETURN(at::Tensor labels, ReadIdxLabels(labels_path));
  if (images.size(0) != labels.size(0)) {
    return absl::InvalidArgumentError(absl::StrCat(images_path, " holds ", images.size(0), " images, but ",
                                                   labels_path, " holds ", labels.size(0), " labels"));
  }
  const uint8_t* label = labels.data_ptr<uint8_t>();
  for (int64_t i = 0; i < labels.size(0); ++i) {
    if (label[i] >= classes) {
      return absl::InvalidArgumentError(absl::StrCat(labels_path, ": label ", i, " is ", int{label[i]},
                                                     ", but labels are 0 to ", classes - 1));
    }
  }
  return Dataset{images.unsqueeze(1), labels.to(at::kLong)};
}

absl::StatusOr<Data> LoadFolder(const std::string& folder) {
  struct stat info;
  if (stat(folder.c_str(), &info) != 0) {
    const absl::Status error = base::ErrnoStatus(errno, absl::StrCat("cannot read the data folder ", folder));
    if (folder != kFashionMnistFolder) return error;
    return base::Annotate(error, "Fashion-MNIST is not installed (Debian package dataset-fashion-mnist)");
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder, " is not a folder; --data takes the folder that holds train-images-idx3-ubyte.gz and so on"));
  }
  Data data;
  ATOLL_ASSIGN_OR_RETURN(data.train, LoadIdxPair(folder, "train", data.classes));
  ATOLL_ASSIGN_OR_RETURN(data.test, LoadIdxPair(folder, "t10k", data.classes));
  if (data.train.images.sizes().slice(1) != data.test.images.sizes().slice(1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder, ": training images are ", data.train.images.size(2), " x ", data.train.images.size(3),
        ", but test images are ", data.test.images.size(2), " x ", data.test.images.size(3)));
  }
  return data;
}

/// A number below `bound`, the same on every machine (std::uniform_int_distribution is not).
uint64_t Below(std::mt19937_64& random, uint64_t bound) {
  const uint64_t limit = std::numeric_limits<uint64_t>::max() / bound * bound;
  uint64_t value = random();
  while (value >= limit) value = random();
  return value % bound;
}

/// One class is one pattern of bright blocks; an image is its pattern with a quarter of the blocks replaced
/// at random, and noise. Easy to learn, not trivial.
Dataset MakeSynthetic(int64_t count, uint64_t seed, int64_t classes) {
  constexpr int64_t kSide = 16, kBlocks = 8, kPixelsPerBlock = kSide / kBlocks;
  std::mt19937_64 patterns(1);
  std::vector<uint8_t> pattern(static_cast<size_t>(classes * kBlocks * kBlocks));
  for (uint8_t& value : pattern) value = Below(patterns, 2) != 0 ? 200 : 30;

  std::mt19937_64 random(seed);
  Dataset out{at::empty({count, 1, kSide, kSide}, at::kByte), at::empty({count}, at::kLong)};
  uint8_t* pixel = out.images.data_ptr<uint8_t>();
  int64_t* label = out.labels.data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    label[i] = i % classes;
    uint8_t blocks[kBlocks * kBlocks];
    std::memcpy(blocks, &pattern[static_cast<size_t>(label[i] * kBlocks * kBlocks)], sizeof(blocks));
    for (uint8_t& block : blocks) {
      if (Below(random, 4) == 0) block = Below(random, 2) != 0 ? 200 : 30;
    }
    for (int64_t y = 0; y < kSide; ++y) {
      for (int64_t x = 0; x < kSide; ++x) {
        const int64_t block = y / kPixelsPerBlock * kBlocks + x / kPixelsPerBlock;
        *pixel++ = static_cast<uint8_t>(blocks[block] + Below(random, 50));
      }
    }
  }
  return out;
}

absl::StatusOr<Data> LoadSynthetic(absl::string_view name) {
  int64_t count = 2048;
  if (name.size() > 9) {
    if (name[9] != ':' || !absl::SimpleAtoi(name.substr(10), &count) || count < 1 || count > 1000000) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the data set '", name, "' should be synthetic or synthetic:N with N in 1 .. 1000000"));
    }
  }
  Data data;
  data.train = MakeSynthetic(count, 2, data.classes);
  data.test = MakeSynthetic(count / 4 + 1, 3, data.classes);
  return data;
}

/// Mean and deviation of the training images' bytes, from a histogram: exact, the same everywhere.
void Measure(Data* data) {
  const uint8_t* byte = data->train.images.data_ptr<uint8_t>();
  const int64_t count = data->train.images.numel();
  int64_t histogram[256] = {};
  for (int64_t i = 0; i < count; ++i) ++histogram[byte[i]];
  double sum = 0, squares = 0;
  for (int value = 0; value < 256; ++value) {
    sum += static_cast<double>(value) * static_cast<double>(histogram[value]);
    squares += static_cast<double>(value) * value * static_cast<double>(histogram[value]);
  }
  data->mean = sum / static_cast<double>(count);
  data->stddev = std::sqrt(std::max(1.0, squares / static_cast<double>(count) - data->mean * data->mean));
}

}  // namespace

absl::StatusOr<at::Tensor> ReadIdxImages(const std::string& path) {
  return ReadIdx(path, kImageMagic, 3, "images");
}

absl::StatusOr<at::Tensor> ReadIdxLabels(const std::string& path) {
  return ReadIdx(path, kLabelMagic, 1, "labels");
}

absl::StatusOr<Data> LoadData(absl::string_view name) try {
  absl::StatusOr<Data> data;
  if (name == "fashion-mnist") {
    data = LoadFolder(kFashionMnistFolder);
  } else if (absl::StrContains(name, '/')) {
    data = LoadFolder(std::string(name));
  } else if (name == "synthetic" || absl::StartsWith(name, "synthetic:")) {
    data = LoadSynthetic(name);
  } else {
    data = absl::NotFoundError(
        absl::StrCat("there is no data set '", name,
                     "': known are fashion-mnist, synthetic, and the path of a folder (with a '/')"));
  }
  if (!data.ok()) return data;
  data->name = std::string(name);
  Measure(&*data);
  return data;
} catch (...) {  // Of LibTorch: no memory for a copy.
  return absl::ResourceExhaustedError(absl::StrCat("the data set '", name, "': ", rpc::ExceptionText()));
}

Batch TakeBatch(const Data& data, const Dataset& from, const at::Tensor& indices) {
  Batch batch;
  batch.images = from.images.index_select(0, indices).to(at::kFloat).sub_(data.mean).div_(data.stddev);
  batch.labels = from.labels.index_select(0, indices);
  return batch;
}

EpochPlan::EpochPlan(const Options& options)
    : options_(options), steps_(Steps(options.count, options.batch, options.workers)) {
  order_.resize(static_cast<size_t>(options.count));
  std::iota(order_.begin(), order_.end(), 0);
  std::mt19937_64 random(options.seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(options.epoch));
  for (size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[Below(random, i)]);
}

int64_t EpochPlan::Steps(int64_t count, int64_t batch, int workers) {
  const int64_t together = batch * workers;
  return count / together + (count % together >= workers ? 1 : 0);
}

at::Tensor EpochPlan::Indices(int64_t step) const {
  const int64_t begin = step * options_.batch * options_.workers;
  const int64_t here = std::min(options_.count - begin, options_.batch * options_.workers);
  const int64_t first = begin + here * options_.worker / options_.workers;
  const int64_t last = begin + here * (options_.worker + 1) / options_.workers;
  at::Tensor indices = at::empty({last - first}, at::kLong);
  std::copy(order_.begin() + first, order_.begin() + last, indices.data_ptr<int64_t>());
  return indices;
}

}  // namespace Atoll::client
