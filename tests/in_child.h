// What a child of fork finds: for tests of objects that have threads.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace Atoll::testing {

/// In a child: what it leaves alone is no leak (tests/main.cc tells LeakSanitizer).
inline bool leaks_count = true;

/// AddressSanitizer's runtime takes no care of fork: a child that was forked while another thread allocated may wait
/// for its allocator for ever. For tests whose other threads are busy meanwhile.
#if defined(__SANITIZE_ADDRESS__)
#define ATOLL_SKIP_IF_A_BUSY_FORK_HANGS() \
  GTEST_SKIP() << "ATOLL_TEST_SKIPPED: AddressSanitizer's allocator may be locked in a child of fork"
#else
#define ATOLL_SKIP_IF_A_BUSY_FORK_HANGS()
#endif

/// Runs `body` in a child, which then ends with exit(): with 0 if the text is empty, else with 1 after it has
/// printed it. Returns the child's end: 0, 1, or the negative number of the signal that ended it (-SIGALRM: it hung).
inline int InChild(const std::function<std::string()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    leaks_count = false;
    const std::string wrong = body();
    if (!wrong.empty()) std::fprintf(stderr, "in the child: %s\n", wrong.c_str());
    std::exit(wrong.empty() ? 0 : 1);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1000;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/// Empty if `status` is how a use in a child should fail; else what is wrong, with `what`.
inline std::string WrongInChild(const absl::Status& status, absl::string_view what) {
  const absl::string_view text = status.message();
  if (absl::IsFailedPrecondition(status) && absl::StrContains(text, absl::StrCat("process ", getpid())) &&
      absl::StrContains(text, absl::StrCat("forked from process ", getppid())) &&
      absl::StrContains(text, "after the fork, or exec")) {
    return "";
  }
  return absl::StrCat(what, " says: ", status.ToString(), "\n");
}

}  // namespace Atoll::testing
