#include "atoll/base/text.h"

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "atoll/base/status.h"

namespace Atoll::base {

std::string OneLine(absl::string_view text) {
  std::string line;
  for (const char c : text) {
    if (c == '\n' || c == '\r' || c == '\t') {
      line.push_back(' ');
    } else if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      line.append(absl::CHexEscape(absl::string_view(&c, 1)));
    } else {
      line.push_back(c);
    }
  }
  return line;
}

std::string ErrorText(const absl::Status& status) {
  if (status.ok()) return "done";
  std::string text = OneLine(status.message());
  if (text.empty()) {  // "DEADLINE_EXCEEDED" -> "deadline exceeded"
    text = absl::AsciiStrToLower(absl::StatusCodeToString(status.code()));
    absl::StrReplaceAll({{"_", " "}}, &text);
  }
  if (!status.GetPayload(kRanUrl).has_value() || absl::StrContains(text, "(ran: ")) return text;
  return absl::StrCat(text, " (ran: ", RanName(GetRan(status)), ")");
}

std::string DurationText(absl::Duration duration) {
  const absl::Duration size = duration < absl::ZeroDuration() ? -duration : duration;
  if (size == absl::InfiniteDuration()) return absl::FormatDuration(duration);
  // The digit that is kept last: the largest step of these that is at most a hundredth.
  absl::Duration step = absl::Nanoseconds(1);
  for (absl::Duration next = step; next * 100 <= size && next <= absl::Seconds(1); next *= 10) step = next;
  const absl::Duration rounded = absl::Trunc(size + step / 2, step);
  return absl::FormatDuration(duration < absl::ZeroDuration() ? -rounded : rounded);
}

}  // namespace Atoll::base
