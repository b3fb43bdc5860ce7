#include "atoll/bench/side.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/log.h"
#include "atoll/base/text.h"

namespace Atoll::bench {
namespace {

constexpr uint64_t kSeedStep = uint64_t{1} << 32;

double Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

}  // namespace

void Die(const std::string& text) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, text.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

void DieOf(const absl::Status& status) {
  if (!status.ok()) Die(base::ErrorText(status));
}

void Begin() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::signal(SIGPIPE, SIG_IGN);
  base::SetLogLevel(base::LogLevel::kError);
  // As the programs do (cluster/program.cc).
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

void Drive(const Work& work) {
  std::cout << "ready" << std::endl;
  uint64_t seed = 0;
  const auto repeat = [&work](double seconds, std::map<int, int64_t>* times) {
    int64_t ops = 0;
    const double begin = Now();
    double before = begin;
    do {
      work.once();
      ++ops;
      const double now = Now();
      if (times != nullptr) ++(*times)[std::lround(std::log((now - before) * 1e9) / std::log(1.02))];
      before = now;
    } while (before - begin < seconds);
    if (work.finish) work.finish();
    return std::make_pair(begin, ops);
  };
  for (std::string line; std::getline(std::cin, line);) {
    double seconds = 0;
    if (!absl::SimpleAtod(line, &seconds) || !(seconds > 0)) Die(absl::StrCat("not a time: ", line));
    if (work.before) work.before(++seed);
    repeat(seconds / 4, nullptr);  // Another process has had the caches meanwhile.
    std::map<int, int64_t> times;
    const auto [begin, ops] = repeat(seconds, &times);
    const double end = Now();
    if (work.check) work.check();
    const std::string counts = absl::StrJoin(times, ", ", [](std::string* out, const auto& entry) {
      absl::StrAppend(out, "\"", entry.first, "\": ", entry.second);
    });
    std::cout << absl::StrFormat(R"({"begin": %.9f, "end": %.9f, "ops": %d, "times": {%s}})", begin, end, ops,
                                 counts)
              << std::endl;
  }
}

void Announce(const std::string& address) {
  std::cout << address << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
  }
}

void Fill(char* data, size_t bytes, uint64_t seed) {
  uint64_t* const words = reinterpret_cast<uint64_t*>(data);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) words[i] = seed * kSeedStep + i;
}

void CheckFilled(const char* data, size_t bytes, uint64_t seed) {
  const uint64_t* const words = reinterpret_cast<const uint64_t*>(data);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
    if (words[i] != seed * kSeedStep + i) Die(absl::StrCat("wrong bytes came, from byte ", 8 * i, " on"));
  }
}

void CopyFront(absl::string_view body, void* to, size_t bytes) {
  if (body.size() < bytes) Die("a body that is too short");
  std::memcpy(to, body.data(), bytes);
}

char* Arena() {
  static char* const arena = [] {
    void* memory =
        mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) Die("no memory for the arena");
    return static_cast<char*>(memory);
  }();
  return arena;
}

std::vector<size_t> ResNet50Bytes() {
  std::vector<size_t> elements = {64 * 3 * 7 * 7, 64, 64};
  size_t in = 64;
  const std::pair<size_t, int> stages[] = {{64, 3}, {128, 4}, {256, 6}, {512, 3}};
  for (const auto& [planes, blocks] : stages) {
    for (int block = 0; block < blocks; ++block) {
      for (size_t count : {planes * in, planes, planes, planes * planes * 9, planes, planes,
                           4 * planes * planes, 4 * planes, 4 * planes}) {
        elements.push_back(count);
      }
      if (block == 0) elements.insert(elements.end(), {4 * planes * in, 4 * planes, 4 * planes});
      in = 4 * planes;
    }
  }
  elements.insert(elements.end(), {1000 * 2048, 1000});
  for (size_t& count : elements) count *= sizeof(float);
  return elements;
}

}  // namespace Atoll::bench
