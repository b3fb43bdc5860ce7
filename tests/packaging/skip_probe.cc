// Driven by skip_test.py: how a test binary ends when its cases are skipped, pass or fail.
#include <gtest/gtest.h>

TEST(SkipProbe, Passes) {}
TEST(SkipProbe, Skips) { GTEST_SKIP() << "ATOLL_TEST_SKIPPED: a probe"; }
TEST(SkipProbe, SkipsToo) { GTEST_SKIP() << "ATOLL_TEST_SKIPPED: another probe"; }
TEST(SkipProbe, Fails) { FAIL() << "ATOLL_TEST_SKIPPED is printed, and yet this has failed"; }
