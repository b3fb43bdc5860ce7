#include "atoll/base/bytes.h"

#include <gtest/gtest.h>

namespace Atoll::base {
namespace {

TEST(Bytes, RoundTrip) {
  ByteWriter writer;
  writer.Put<uint8_t>(7);
  writer.Put<int64_t>(-5);
  writer.Put(true);
  writer.Put(2.5);
  writer.PutString("name");
  std::string bytes = std::move(writer).Take();
  ByteReader reader(bytes);
  EXPECT_EQ(reader.Get<uint8_t>(), 7);
  EXPECT_EQ(reader.Get<int64_t>(), -5);
  EXPECT_TRUE(reader.Get<bool>());
  EXPECT_EQ(reader.Get<double>(), 2.5);
  EXPECT_EQ(reader.GetString(10), "name");
  EXPECT_TRUE(reader.Finish().ok());
}

TEST(Bytes, EveryTruncationIsAnErrorAndReadsNothingBeyond) {
  ByteWriter writer;
  writer.Put<uint64_t>(1);
  writer.PutString("hello");
  std::string bytes = std::move(writer).Take();
  for (size_t size = 0; size < bytes.size(); ++size) {
    std::string cut = bytes.substr(0, size);
    ByteReader reader(cut);
    reader.Get<uint64_t>();
    EXPECT_TRUE(reader.GetString(10).size() <= 5);
    EXPECT_EQ(reader.Finish().code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(Bytes, LimitsCountsAndLeftovers) {
  ByteWriter writer;
  writer.Put<uint32_t>(0xffffffff);
  std::string bytes = std::move(writer).Take();
  {
    ByteReader reader(bytes);
    EXPECT_EQ(reader.GetCount(8), 0u);
    EXPECT_FALSE(reader.ok());
  }
  {
    ByteReader reader(bytes);
    EXPECT_EQ(reader.GetString(100), "");
    EXPECT_FALSE(reader.ok());
  }
  {
    ByteReader reader(bytes);
    reader.Get<uint16_t>();
    absl::Status status = reader.Finish();
    EXPECT_EQ(status.message(), "malformed message: bytes left over at the end (at byte 2)");
  }
  ByteReader boolean("\x02");
  EXPECT_FALSE(boolean.Get<bool>());
  EXPECT_FALSE(boolean.ok());
}

}  // namespace
}  // namespace Atoll::base
