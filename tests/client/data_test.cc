#include "atoll/client/data.h"

#include <stdlib.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include "absl/strings/str_cat.h"

namespace Atoll::client {
namespace {

using ::testing::HasSubstr;

std::string Big(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8),
          static_cast<char>(value)};
}

std::string Images(uint32_t count, uint32_t rows, uint32_t columns) {
  std::string out = Big(0x803) + Big(count) + Big(rows) + Big(columns);
  for (uint32_t i = 0; i < count * rows * columns; ++i) out.push_back(static_cast<char>(i * 7));
  return out;
}

std::string Labels(uint32_t count) {
  std::string out = Big(0x801) + Big(count);
  for (uint32_t i = 0; i < count; ++i) out.push_back(static_cast<char>(i % 10));
  return out;
}

class DataFolder : public ::testing::Test {
 protected:
  DataFolder() {
    std::string pattern = ::testing::TempDir() + "/atoll-data-XXXXXX";
    folder_ = mkdtemp(pattern.data());
    Write("train-images-idx3-ubyte", Images(20, 6, 5));
    Write("train-labels-idx1-ubyte", Labels(20));
    WriteGz("t10k-images-idx3-ubyte", Images(11, 6, 5));
    WriteGz("t10k-labels-idx1-ubyte", Labels(11));
  }
  ~DataFolder() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary | std::ios::trunc) << bytes;
  }
  void WriteGz(const std::string& name, const std::string& bytes) {
    gzFile file = gzopen((folder_ + "/" + name + ".gz").c_str(), "wb");
    ASSERT_EQ(gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    ASSERT_EQ(gzclose(file), Z_OK);
  }
  std::string ReadBytes(const std::string& name) {
    std::ifstream in(folder_ + "/" + name, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// The error must name the file and say `what`.
  void ExpectError(absl::StatusCode code, const std::string& file, const std::string& what) {
    const absl::Status error = LoadData(folder_).status();
    EXPECT_EQ(error.code(), code) << error;
    EXPECT_THAT(std::string(error.message()), HasSubstr(file.empty() ? folder_ : folder_ + "/" + file));
    EXPECT_THAT(std::string(error.message()), HasSubstr(what));
  }

  std::string folder_;
};

TEST_F(DataFolder, ReadsPlainAndGzippedFiles) {
  const absl::StatusOr<Data> data = LoadData(folder_);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ(data->train.images.sizes(), (std::vector<int64_t>{20, 1, 6, 5}));
  EXPECT_EQ(data->test.images.sizes(), (std::vector<int64_t>{11, 1, 6, 5}));
  EXPECT_EQ(data->train.images[3][0][2][4].item<int64_t>(), ((3 * 6 + 2) * 5 + 4) * 7 % 256);
  EXPECT_EQ(data->train.labels[13].item<int64_t>(), 3);
  EXPECT_NEAR(data->mean, data->train.images.to(at::kDouble).mean().item<double>(), 1e-9);
  EXPECT_NEAR(data->stddev, data->train.images.to(at::kDouble).std(false).item<double>(), 1e-9);

  const Batch batch = TakeBatch(*data, data->train, at::tensor({7, 2}, at::kLong));
  EXPECT_EQ(batch.labels[0].item<int64_t>(), 7);
  EXPECT_NEAR(batch.images[1][0][0][0].item<double>(), (2 * 30 * 7 % 256 - data->mean) / data->stddev, 1e-5);
}

TEST_F(DataFolder, SaysWhatIsWrongWithAFile) {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto loss = absl::StatusCode::kDataLoss;
  const std::string images = "train-images-idx3-ubyte", labels = "train-labels-idx1-ubyte";
  const std::string good = Images(20, 6, 5);

  Write(images, good.substr(0, good.size() - 1));
  ExpectError(loss, images, "truncated");
  Write(images, good.substr(0, 9));
  ExpectError(loss, images, "IDX header");
  Write(images, "");
  ExpectError(loss, images, "IDX header");
  Write(images, good + "x");
  ExpectError(loss, images, "bytes after its end");
  Write(images, "P5 28 28 is another format");
  ExpectError(invalid, images, "no IDX file of images");
  Write(images, Labels(20) + std::string(20, 'x'));
  ExpectError(invalid, images, "0x00000801");
  Write(images, Images(0, 6, 5));
  ExpectError(invalid, images, "holds no images");
  Write(images, Images(19, 6, 5));
  ExpectError(invalid, labels, "20 labels");
  Write(images, Images(20, 5, 6));
  ExpectError(invalid, "", "test images are 6 x 5");
  // Sizes that nobody has memory for are refused before any is taken.
  Write(images, Big(0x803) + Big(0xffffffff) + Big(0xffffffff) + Big(0xffffffff) + "rest");
  ExpectError(invalid, images, "more than is read");
  Write(images, Big(0x803) + Big(1 << 20) + Big(32) + Big(32) + "rest");
  ExpectError(loss, images, "more than the file can hold");
  Write(images, good);

  std::string label_bytes = Labels(20);
  label_bytes.back() = 10;
  Write(labels, label_bytes);
  ExpectError(invalid, labels, "label 19 is 10");
  std::filesystem::remove(folder_ + "/" + labels);
  ExpectError(absl::StatusCode::kNotFound, labels, "is there");
}

TEST_F(DataFolder, NoTruncatedOrChangedGzippedFileIsTakenForGood) {
  const std::string name = "t10k-labels-idx1-ubyte.gz";
  const std::string good = ReadBytes(name);
  const at::Tensor labels = LoadData(folder_)->test.labels;
  ASSERT_GT(good.size(), 20u);
  for (size_t size = 0; size < good.size(); ++size) {
    Write(name, good.substr(0, size));
    const absl::Status error = LoadData(folder_).status();
    EXPECT_FALSE(error.ok()) << "cut to " << size << " bytes";
    EXPECT_THAT(std::string(error.message()), HasSubstr(name));
  }
  for (size_t i = 10; i < good.size(); ++i) {  // The 10 bytes of gzip's header hold flags and a date.
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x20);
    Write(name, bad);
    // A bit that pads the last byte of the deflated data means nothing.
    const absl::StatusOr<Data> data = LoadData(folder_);
    EXPECT_TRUE(!data.ok() || at::equal(data->test.labels, labels)) << "byte " << i;
  }
}

TEST_F(DataFolder, NamesWhatIsNotThere) {
  EXPECT_EQ(LoadData(folder_ + "/nowhere").status().code(), absl::StatusCode::kNotFound);
  const absl::Status unknown = LoadData("cifar").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("known are fashion-mnist, synthetic"));
  EXPECT_THAT(std::string(LoadData(folder_ + "/train-images-idx3-ubyte").status().message()),
              HasSubstr("is not a folder"));
  for (const char* name : {"synthetic:", "synthetic:0", "synthetic:x", "synthetic:1000001", "synthetic:-3"}) {
    EXPECT_EQ(LoadData(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(LoadData("synthetics").status().code(), absl::StatusCode::kNotFound);
}

TEST(DataTest, SyntheticIsAlwaysTheSame) {
  const absl::StatusOr<Data> a = LoadData("synthetic:100"), b = LoadData("synthetic:200");
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_EQ(a->train.size(), 100);
  EXPECT_EQ(a->test.size(), 26);
  EXPECT_TRUE(at::equal(a->train.images, b->train.images.narrow(0, 0, 100)));
  EXPECT_FALSE(at::equal(a->train.images.narrow(0, 0, 26), a->test.images));
}

TEST(EpochPlanTest, EveryImageIsTakenOnceAndStepsAgree) {
  for (int workers : {1, 2, 3, 5}) {
    for (int64_t batch : {1, 4, 7}) {
      for (int64_t count : {1, 2, 5, 7, 30, 31, 64, 100}) {
        SCOPED_TRACE(absl::StrCat(count, " images, batch ", batch, ", ", workers, " workers"));
        std::multiset<int64_t> taken;
        const int64_t steps = EpochPlan::Steps(count, batch, workers);
        for (int worker = 0; worker < workers; ++worker) {
          const EpochPlan plan(
              {.count = count, .batch = batch, .worker = worker, .workers = workers, .seed = 5, .epoch = 2});
          ASSERT_EQ(plan.steps(), steps);
          for (int64_t step = 0; step < steps; ++step) {
            const at::Tensor indices = plan.Indices(step);
            EXPECT_GE(indices.numel(), 1);
            EXPECT_LE(indices.numel(), batch);
            for (int64_t i = 0; i < indices.numel(); ++i) taken.insert(indices[i].item<int64_t>());
          }
        }
        const std::set<int64_t> distinct(taken.begin(), taken.end());
        EXPECT_EQ(distinct.size(), taken.size()) << "an image was taken twice";
        const int64_t left = count % (batch * workers);
        EXPECT_EQ(static_cast<int64_t>(taken.size()), left < workers ? count - left : count);
        for (int64_t image : distinct) EXPECT_TRUE(image >= 0 && image < count);
      }
    }
  }
}

TEST(EpochPlanTest, OrderDependsOnSeedAndEpochAlone) {
  const auto order = [](uint64_t seed, int64_t epoch) {
    return EpochPlan({.count = 50, .batch = 50, .worker = 0, .workers = 1, .seed = seed, .epoch = epoch})
        .Indices(0);
  };
  EXPECT_TRUE(at::equal(order(1, 0), order(1, 0)));
  EXPECT_FALSE(at::equal(order(1, 0), order(1, 1)));
  EXPECT_FALSE(at::equal(order(1, 0), order(2, 0)));
}

}  // namespace
}  // namespace Atoll::client
