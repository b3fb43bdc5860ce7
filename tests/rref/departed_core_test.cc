#include "atoll/rref/departed_core.h"

#include <gtest/gtest.h>

namespace Atoll::rref {
namespace {

TEST(DepartedTest, KeepsTheFirstReasonAndForgetsTheOldest) {
  const base::MemberId ann{"ann", base::Incarnation(1)}, bob{"bob", base::Incarnation(2)},
      again{"ann", base::Incarnation(3)};
  Departed departed(2);
  EXPECT_EQ(departed.Find(ann), nullptr);
  EXPECT_TRUE(departed.Add(ann, absl::UnavailableError("killed")));
  EXPECT_FALSE(departed.Add(ann, absl::UnavailableError("left")));
  EXPECT_TRUE(departed.Add(bob, absl::OkStatus()));
  ASSERT_NE(departed.Find(ann), nullptr);
  EXPECT_EQ(departed.Find(ann)->message(), "killed");
  EXPECT_TRUE(departed.Contains(bob));
  EXPECT_TRUE(departed.Add(again, absl::OkStatus()));
  EXPECT_EQ(departed.Find(ann), nullptr);
  EXPECT_TRUE(departed.Contains(bob));
  EXPECT_TRUE(departed.Contains(again));
}

}  // namespace
}  // namespace Atoll::rref
