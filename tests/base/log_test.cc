#include "atoll/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"

namespace Atoll::base {
namespace {

// Sets the level for one test: the level is the process's.
class LogTest : public testing::Test {
 protected:
  ~LogTest() override {
    SetLogLevel(LogLevel::kWarning);
    SetLogName("-");
  }
};

TEST_F(LogTest, ALineHasLevelTimeNamePlaceAndText) {
  SetLogName("worker1#3f2a");
  testing::internal::CaptureStderr();
  ATOLL_LOG(kWarning) << "lost " << 3 << " of them";
  std::string line = testing::internal::GetCapturedStderr();
  EXPECT_THAT(line, testing::ContainsRegex("^W[0-9]{4} [0-9:]{8}\\.[0-9]{6} worker1#3f2a "
                                           "base/log_test\\.cc:[0-9]+\\] lost 3 of them\n$"));
}

TEST_F(LogTest, BelowTheLevelNothingIsWrittenOrEvaluated) {
  int evaluated = 0;
  auto text = [&] { return ++evaluated; };
  testing::internal::CaptureStderr();
  ATOLL_LOG(kInfo) << text();
  SetLogLevel(LogLevel::kInfo);
  ATOLL_LOG(kInfo) << text();
  ATOLL_LOG(kDebug) << text();
  std::string lines = testing::internal::GetCapturedStderr();
  EXPECT_EQ(evaluated, 1);
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 1);
}

TEST_F(LogTest, LinesOfSeveralThreadsStayWhole) {
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) ATOLL_LOG(kWarning) << "begin " << std::string(200, 'x') << " end";
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::string> lines = absl::StrSplit(testing::internal::GetCapturedStderr(), '\n');
  ASSERT_EQ(lines.size(), 401u);  // The last is empty: what follows the last newline.
  lines.pop_back();
  for (const std::string& line : lines) {
    EXPECT_EQ(line[0], 'W');
    EXPECT_TRUE(absl::string_view(line).substr(line.size() - 4) == " end") << line;
  }
}

TEST_F(LogTest, NamesOfLevels) {
  LogLevel level = LogLevel::kError;
  EXPECT_TRUE(ParseLogLevel("debug", &level));
  EXPECT_EQ(level, LogLevel::kDebug);
  EXPECT_FALSE(ParseLogLevel("loud", &level));
  EXPECT_FALSE(ParseLogLevel("", &level));
  EXPECT_EQ(level, LogLevel::kDebug);
}

TEST_F(LogTest, AnElseAfterALogBelongsToTheIfBeforeIt) {
  bool other = false;
  // clang-format off
  if (false)
    ATOLL_LOG(kError) << "not written";
  else
    other = true;
  // clang-format on
  EXPECT_TRUE(other);
}

TEST(LogDeathTest, AFailedCheckNamesTheCondition) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  int owners = 0;
  EXPECT_DEATH(ATOLL_CHECK(owners > 0) << "in a job", "check failed: owners > 0 in a job");
  ATOLL_CHECK(owners == 0) << "never evaluated";
}

}  // namespace
}  // namespace Atoll::base
