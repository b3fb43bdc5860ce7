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

TEST(RRefWireTest, NamesOfClassesAndObjectsHaveNoControlCharacters) {
  const base::ForkId fork{base::Incarnation(7), 4};
  auto create = [&](const std::string& class_name, const std::string& pinned) {
    return DecodeCreate(Encode(CreateRequest{fork, class_name, pinned}, "")).status().code();
  };
  auto find = [&](const std::string& pinned) {
    return DecodeFind(Encode(FindRequest{fork, pinned})).status().code();
  };
  constexpr auto kOk = absl::StatusCode::kOk;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  for (const std::string& odd :
       {std::string("two\nlines"), std::string("\x1b[2J"), std::string("nul\0", 4), std::string("\x7f")}) {
    EXPECT_EQ(create(odd, ""), kInvalid) << odd;
    EXPECT_EQ(create("Class", odd), kInvalid) << odd;
    EXPECT_EQ(find(odd), kInvalid) << odd;
  }
  EXPECT_EQ(create("", ""), kInvalid);
  EXPECT_EQ(find(""), kInvalid);
  EXPECT_EQ(create(std::string(kMaxClassNameBytes + 1, 'c'), ""), kInvalid);
  EXPECT_EQ(create(std::string(kMaxClassNameBytes, 'c'), std::string(kMaxPinnedNameBytes, 'p')), kOk);
  EXPECT_EQ(find("modèle 1/共有"), kOk);
}

}  // namespace
}  // namespace Atoll::rref
