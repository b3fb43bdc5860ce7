#include "atoll/rpc/sink.h"

#include <gtest/gtest.h>

namespace Atoll::rpc {
namespace {

TEST(Sink, TakesAnyNumberOfBytesInTheSameMemory) {
  for (size_t bytes : {size_t{1}, size_t{4097}, (size_t{2} << 20) + 1, size_t{1} << 28, size_t{1} << 40}) {
    absl::StatusOr<at::Tensor> sink = Sink(bytes);
    ASSERT_TRUE(sink.ok()) << sink.status();
    EXPECT_EQ(sink->nbytes(), bytes);
    auto* data = static_cast<char*>(sink->data_ptr());
    data[0] = 1;
    data[bytes - 1] = 2;
  }
}

TEST(Sink, CostsNoMemory) {
  constexpr size_t kBytes = size_t{1} << 27;  // 64 pieces of 2 MiB.
  absl::StatusOr<at::Tensor> sink = Sink(kBytes);
  ASSERT_TRUE(sink.ok()) << sink.status();
  // Volatile: the compiler knows that places of one array differ.
  auto* data = static_cast<volatile char*>(sink->data_ptr());
  // What is written in one place stands in the others.
  for (size_t at = 0; at < kBytes; at += 4096) data[at] = 1;
  data[5] = 7;
  EXPECT_EQ(data[(size_t{2} << 20) + 5], 7);
}

TEST(Sink, WhatTheSystemDoesNotGiveIsAnError) {
  absl::Status status = Sink(size_t{1} << 62).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

}  // namespace
}  // namespace Atoll::rpc
