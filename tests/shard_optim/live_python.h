// The Python of the torch that we link, for tests that compare with it live: a committed recording would hold
// the values of one machine's libraries.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace Atoll::shard_optim {

/// Runs that Python with `arguments`; its exit status, -1 if it did not start. With `quiet` its errors are not
/// shown.
int RunPython(std::vector<std::string> arguments, bool quiet = false);

/// Whether it can import torch.
bool PythonHasTorch();

/// Skips the calling test, so that ctest shows it, where there is nothing to compare with.
#define ATOLL_NEEDS_PYTHON()                                                                           \
  if (!::Atoll::shard_optim::PythonHasTorch()) {                                                       \
    std::puts("ATOLL_TEST_SKIPPED: " ATOLL_TEST_PYTHON " cannot import torch: no parity with Python"); \
    GTEST_SKIP();                                                                                      \
  }

}  // namespace Atoll::shard_optim
