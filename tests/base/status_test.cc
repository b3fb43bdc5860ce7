#include "atoll/base/status.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "atoll/base/ids.h"

namespace Atoll::base {
namespace {

TEST(Status, RanTravelsThroughAnnotate) {
  absl::Status status = WithRan(absl::UnavailableError("gone"), Ran::kNo);
  absl::Status outer = Annotate(status, "call add");
  EXPECT_EQ(outer.message(), "call add: gone");
  EXPECT_EQ(outer.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(GetRan(outer), Ran::kNo);
  EXPECT_EQ(GetRan(absl::InternalError("x")), Ran::kMaybe);
  EXPECT_EQ(GetRan(WithRan(outer, Ran::kYes)), Ran::kYes);
  EXPECT_TRUE(Annotate(absl::OkStatus(), "x").ok());
}

TEST(Status, ErrnoTextAndCode) {
  absl::Status status = ErrnoStatus(ECONNREFUSED, "connect to 127.0.0.1:1");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "connect to 127.0.0.1:1: Connection refused");
}

TEST(Ids, IncarnationsAreFreshAndNeverZero) {
  EXPECT_NE(NewIncarnation(), NewIncarnation());
  EXPECT_NE(NewIncarnation().value(), 0u);
  EXPECT_EQ((MemberId{"worker1", Incarnation(0xab3f2a)}.ToString()), "worker1#3f2a");
}

}  // namespace
}  // namespace Atoll::base
