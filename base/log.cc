#include "atoll/base/log.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace Atoll::base {
namespace {

// The sink of a process is one by nature; nothing but the text of log lines depends on it.
std::atomic<int> g_level{static_cast<int>(LogLevel::kWarning)};
ABSL_CONST_INIT absl::Mutex g_name_mu(absl::kConstInit);

std::string& Name() {
  static auto* name = new std::string("-");
  return *name;
}

// "/x/y/rpc/session.cc" -> "rpc/session.cc".
absl::string_view ShortFile(absl::string_view file) {
  size_t slash = file.rfind('/');
  if (slash == absl::string_view::npos || slash == 0) return file;
  slash = file.rfind('/', slash - 1);
  return slash == absl::string_view::npos ? file : file.substr(slash + 1);
}

}  // namespace

void SetLogLevel(LogLevel level) { g_level.store(static_cast<int>(level)); }

bool LogEnabled(LogLevel level) { return static_cast<int>(level) >= g_level.load(std::memory_order_relaxed); }

bool ParseLogLevel(absl::string_view text, LogLevel* level) {
  constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  for (int i = 0; i < 4; ++i) {
    if (text == kNames[i]) {
      *level = static_cast<LogLevel>(i);
      return true;
    }
  }
  return false;
}

void SetLogName(absl::string_view name) {
  absl::MutexLock lock(&g_name_mu);
  Name() = std::string(name);
}

LogLine::LogLine(LogLevel level, const char* file, int line) : level_(level) {
  constexpr char kLetters[] = "DIWEF";
  stream_ << kLetters[static_cast<int>(level)]
          << absl::FormatTime("%m%d %H:%M:%E6S", absl::Now(), absl::LocalTimeZone()) << ' ';
  {
    absl::MutexLock lock(&g_name_mu);
    stream_ << Name();
  }
  stream_ << ' ' << ShortFile(file).data() << ':' << line << "] ";
}

LogLine::~LogLine() {
  stream_ << '\n';
  std::string line = stream_.str();
  // One write a line keeps lines of several processes whole. A failed write has nobody to tell.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  if (level_ == LogLevel::kFatal) std::abort();
}

}  // namespace Atoll::base
