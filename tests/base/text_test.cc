#include "atoll/base/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "atoll/base/status.h"

namespace Atoll::base {
namespace {

TEST(OneLine, IsOneAndHarmsNoTerminal) {
  EXPECT_EQ(OneLine("a\nb\r\tc"), "a b  c");
  EXPECT_EQ(OneLine("no\x1b[2J\x7f"), "no\\x1b[2J\\x7f");
  EXPECT_EQ(OneLine("größer"), "größer");
}

TEST(ErrorText, IsTheMessage) {
  EXPECT_EQ(ErrorText(absl::UnavailableError("no\nanswer")), "no answer");
  EXPECT_EQ(ErrorText(absl::OkStatus()), "done");
  EXPECT_EQ(ErrorText(absl::DeadlineExceededError("")), "deadline exceeded");
}

TEST(ErrorText, SaysOnceWhetherItRan) {
  EXPECT_EQ(ErrorText(WithRan(absl::UnavailableError("it died"), Ran::kNo)), "it died (ran: no)");
  EXPECT_EQ(ErrorText(WithRan(absl::UnavailableError("it died"), Ran::kMaybe)), "it died (ran: maybe)");
  EXPECT_EQ(ErrorText(WithRan(absl::InternalError("it threw (ran: yes)"), Ran::kYes)), "it threw (ran: yes)");
  EXPECT_EQ(ErrorText(WithRan(absl::UnavailableError(""), Ran::kYes)), "unavailable (ran: yes)");
  absl::Status other = absl::UnavailableError("x");
  other.SetPayload("somebody/else", absl::Cord("y"));
  EXPECT_EQ(ErrorText(other), "x");
}

TEST(DurationText, HasThreeDigits) {
  EXPECT_EQ(DurationText(absl::Nanoseconds(1999997411)), "2s");
  EXPECT_EQ(DurationText(absl::Nanoseconds(1944900284)), "1.94s");
  EXPECT_EQ(DurationText(absl::Nanoseconds(59999903462)), "1m");
  EXPECT_EQ(DurationText(absl::Milliseconds(43210)), "43.2s");
  EXPECT_EQ(DurationText(absl::Microseconds(249900)), "250ms");
  EXPECT_EQ(DurationText(absl::Microseconds(1500)), "1.5ms");
  EXPECT_EQ(DurationText(absl::Milliseconds(754321)), "12m34s");
  EXPECT_EQ(DurationText(absl::Hours(24)), "24h");
  EXPECT_EQ(DurationText(absl::Hours(24) - absl::Milliseconds(3)), "24h");
  EXPECT_EQ(DurationText(absl::ZeroDuration()), "0");
  EXPECT_EQ(DurationText(absl::Nanoseconds(7)), "7ns");
  EXPECT_EQ(DurationText(absl::Nanoseconds(-1999997411)), "-2s");
  EXPECT_EQ(DurationText(absl::InfiniteDuration()), "inf");
  EXPECT_EQ(DurationText(-absl::InfiniteDuration()), "-inf");
}

}  // namespace
}  // namespace Atoll::base
