#include "recorded.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "live_python.h"

namespace Atoll::shard_optim {
namespace {

struct Config {
  int workers;
  double weight_decay;
  double beta1;
  bool late;
};
constexpr Config kConfigs[] = {{1, 0, 0.9, false},    {1, 0.01, 0.9, true},  {2, 0, 0.9, true},
                               {2, 0.01, 0.9, false}, {3, 0.01, 0.9, false}, {2, 0.01, 0.25, false}};

std::vector<ParameterSpec> Parameters() {
  std::vector<std::vector<int64_t>> sizes = {{3},  {7},  {13},     {15},     {1},
                                             {64}, {65}, {31, 33}, {100003}, {40, 301}};
  std::vector<ParameterSpec> specs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    ParameterSpec spec;
    spec.name = absl::StrCat("p", i);
    spec.sizes = sizes[i];
    spec.strides = sizes[i].size() == 1 ? std::vector<int64_t>{1} : std::vector<int64_t>{sizes[i][1], 1};
    specs.push_back(spec);
  }
  return specs;
}

void Read(std::ifstream& in, Recorded::Tensors& tensors, const std::vector<ParameterSpec>& specs) {
  for (const ParameterSpec& spec : specs) {
    tensors.emplace_back(spec.numel());
    in.read(reinterpret_cast<char*>(tensors.back().data()), spec.numel() * sizeof(float));
  }
}

Recorded Load(const std::string& path, const Config& config) {
  Recorded recorded;
  recorded.workers = config.workers;
  recorded.late = config.late;
  recorded.optimizer.beta1 = config.beta1;
  recorded.optimizer.weight_decay = config.weight_decay;
  recorded.parameters = Parameters();
  std::ifstream in(path, std::ios::binary);
  Read(in, recorded.start, recorded.parameters);
  recorded.gradients.resize(Recorded::kSteps, std::vector<Recorded::Tensors>(config.workers));
  for (auto& step : recorded.gradients) {
    for (Recorded::Tensors& worker : step) Read(in, worker, recorded.parameters);
  }
  for (const ParameterSpec& spec : recorded.parameters) {
    Read(in, recorded.end, {spec});
    Read(in, recorded.exp_avg, {spec});
    Read(in, recorded.exp_avg_sq, {spec});
  }
  EXPECT_TRUE(in.good() && in.peek() == EOF) << path << " has another size than expected";
  return recorded;
}

std::vector<Recorded> Record() {
  if (!PythonHasTorch()) return {};
  std::string folder = absl::StrCat(::testing::TempDir(), "atoll_recorded_", getpid());
  std::filesystem::create_directories(folder);
  std::vector<std::string> command = {ATOLL_TEST_FOLDER "/record_adam.py", folder};
  for (const Config& config : kConfigs) {
    command.push_back(
        absl::StrCat(config.workers, ",", config.weight_decay, ",", config.beta1, ",", config.late ? 1 : 0));
  }
  std::vector<Recorded> recordings;
  int status = RunPython(command);
  EXPECT_EQ(status, 0) << "record_adam.py failed";
  for (size_t i = 0; status == 0 && i < std::size(kConfigs); ++i) {
    recordings.push_back(Load(absl::StrCat(folder, "/", i, ".bin"), kConfigs[i]));
  }
  std::filesystem::remove_all(folder);
  return recordings;
}

}  // namespace

const std::vector<Recorded>& Recordings() {
  static const std::vector<Recorded>* recordings = new std::vector<Recorded>(Record());
  return *recordings;
}

}  // namespace Atoll::shard_optim
