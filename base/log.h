// A thin logger: one line, one write. Its macros carry our prefix, since c10 defines LOG, CHECK and
// VLOG. A line reads
//   I1130 14:02:03.123456 worker1#3f2a rpc/session.cc:88] text key=value
// where the second part names the process (SetLogName). Standard error only; the level is set once,
// in main, from --log_level or ATOLL_LOG_LEVEL.
#pragma once

#include <sstream>

#include "absl/strings/string_view.h"

namespace Atoll::base {

enum class LogLevel { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3, kFatal = 4 };

/// Lines below `level` are not written. Default kWarning: a library is quiet.
void SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);
/// Parses "debug", "info", "warning" or "error". Returns false for anything else.
bool ParseLogLevel(absl::string_view text, LogLevel* level);
/// The name of this process in each line ("worker1#3f2a"). Ranks that share a process share it.
void SetLogName(absl::string_view name);

/// One line; written when it goes out of scope. kFatal then ends the process with abort().
class LogLine {
 public:
  LogLine(LogLevel level, const char* file, int line);
  ~LogLine();
  std::ostream& stream() { return stream_; }

 private:
  LogLevel level_;
  std::ostringstream stream_;
};

}  // namespace Atoll::base

#define ATOLL_LOG(severity)                                                                                \
  for (bool atoll_log_once = ::Atoll::base::LogEnabled(::Atoll::base::LogLevel::severity); atoll_log_once; \
       atoll_log_once = false)                                                                             \
  ::Atoll::base::LogLine(::Atoll::base::LogLevel::severity, __FILE__, __LINE__).stream()

/// For our own bugs only, never for bytes from the wire or a user's mistake.
#define ATOLL_CHECK(condition)                                                         \
  for (bool atoll_failed = !(condition); atoll_failed; atoll_failed = false)           \
  ::Atoll::base::LogLine(::Atoll::base::LogLevel::kFatal, __FILE__, __LINE__).stream() \
      << "check failed: " #condition " "
