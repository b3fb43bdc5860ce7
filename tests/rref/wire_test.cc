#include "atoll/rref/wire.h"

#include <string>

#include <gtest/gtest.h>

namespace Atoll::rref {
namespace {

const base::ObjectId kObject{base::Incarnation(7), 3};

TEST(RRefWireTest, ACallsPrefixReadsBack) {
  const std::string bytes = Encode(CallPrefix{kObject, {"shard.push_gradient", 2}}, "the rest");
  const auto prefix = DecodeCall(bytes);
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ(prefix->object, kObject);
  EXPECT_EQ(prefix->method, (rpc::MethodId{"shard.push_gradient", 2}));
  EXPECT_EQ(bytes.substr(prefix->request_at), "the rest");
  for (size_t size = 0; size < prefix->request_at; ++size) {
    EXPECT_EQ(DecodeCall(bytes.substr(0, size)).status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
}

TEST(RRefWireTest, OddMethodNamesAreRefused) {
  for (const std::string& name :
       {std::string(), std::string("push\ngradient"), std::string("\x1b[2J"), std::string("Push"),
        std::string("pu\0sh", 5), std::string("\xc3\xa4"), std::string(129, 'a')}) {
    const auto prefix = DecodeCall(Encode(CallPrefix{kObject, {name, 1}}, ""));
    EXPECT_EQ(prefix.status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_TRUE(DecodeCall(Encode(CallPrefix{kObject, {std::string(128, 'a'), 1}}, "")).ok());
}

}  // namespace
}  // namespace Atoll::rref
