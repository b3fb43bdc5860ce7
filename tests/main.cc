// The main of every test binary of GoogleTest. Beside what gtest_main does, it says when nothing was tested: where all
// cases that ran skipped themselves (no GPU, say) it ends with ATOLL_SKIP_CODE, which ctest shows as "Skipped". One
// failed case is a failure, whatever the others did or printed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "in_child.h"

#if defined(__SANITIZE_ADDRESS__)
// Seen by the runtime, which is a library of its own.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() {
  return !Atoll::testing::leaks_count;
}  // NOLINT: the runtime's name.
#endif

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  const int code = RUN_ALL_TESTS();
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  const int skipped = all.skipped_test_count();
  return code == 0 && skipped > 0 && skipped == all.test_to_run_count() ? ATOLL_SKIP_CODE : code;
}
