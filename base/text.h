// What people read: errors in log lines and at a program's end, and durations in them.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace Atoll::base {

/// The name under which a status keeps what WithRan attached.
inline constexpr char kRanUrl[] = "atoll/ran";

/// `text` in one line, fit for a terminal: line ends and tabs are blanks, other control characters are escaped.
std::string OneLine(absl::string_view text);

/// An error for people, in one line: its message, or where it has none its code in words; behind it "(ran: no)" where
/// that is attached and the message does not say it. Never the syntax of a code or payload, which is what a status
/// puts into a stream. "done" for an OK status.
std::string ErrorText(const absl::Status& status);

/// `duration` to three digits: one that was measured, or is what is left of a limit, reads as people would say it
/// ("2s" for 1.999997411s).
std::string DurationText(absl::Duration duration);

}  // namespace Atoll::base
