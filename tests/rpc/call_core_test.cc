#include "atoll/rpc/call_core.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

namespace Atoll::rpc {
namespace {

using base::Ran;

std::unique_ptr<PendingCall> Until(absl::Time deadline) {
  auto call = std::make_unique<PendingCall>();
  call->deadline = deadline;
  return call;
}

const absl::Time kStart = absl::UnixEpoch();

TEST(CallTable, TheWatermarkIsTheLowestAwaited) {
  CallTable table;
  EXPECT_EQ(table.watermark(), 1u);
  for (uint64_t id = 1; id <= 4; ++id) EXPECT_EQ(table.Add(Until(absl::InfiniteFuture())), id);
  EXPECT_EQ(table.watermark(), 1u);
  EXPECT_NE(table.Take(2), nullptr);
  EXPECT_EQ(table.watermark(), 1u);
  EXPECT_NE(table.Take(1), nullptr);
  EXPECT_EQ(table.watermark(), 3u);
  table.TakeAll();
  EXPECT_EQ(table.watermark(), 5u);
}

TEST(CallTable, EachCallEndsOnceInEveryOrder) {
  // Its answer, a repeated answer and its deadline, in all orders: one of them ends it.
  std::vector<int> events = {0, 1, 2};
  do {
    CallTable table;
    uint64_t id = table.Add(Until(kStart + absl::Seconds(1)));
    int ends = 0;
    for (int event : events) {
      if (event < 2) {
        ends += table.Take(id) != nullptr;
      } else {
        ends += static_cast<int>(table.TakeExpired(kStart + absl::Seconds(1)).calls.size());
      }
      table.CheckInvariants();
    }
    EXPECT_EQ(ends, 1);
    EXPECT_EQ(table.NextDeadline(), absl::InfiniteFuture());
  } while (std::next_permutation(events.begin(), events.end()));
}

TEST(CallTable, DeadlinesComeInOrder) {
  CallTable table;
  for (int seconds : {5, 1, 3}) table.Add(Until(kStart + absl::Seconds(seconds)));
  EXPECT_EQ(table.NextDeadline(), kStart + absl::Seconds(1));
  EXPECT_EQ(table.TakeExpired(kStart + absl::Seconds(3)).calls.size(), 2u);
  EXPECT_EQ(table.NextDeadline(), kStart + absl::Seconds(5));
  EXPECT_EQ(table.size(), 1u);
}

TEST(CallTable, ACallThatIsLandingEndsWithItsTransfer) {
  CallTable table;
  uint64_t id = table.Add(Until(kStart));
  table.Find(id)->landing = true;
  CallTable::Expired expired = table.TakeExpired(kStart);
  EXPECT_TRUE(expired.calls.empty());
  EXPECT_TRUE(expired.landing);
  EXPECT_TRUE(table.Find(id)->expired);
  EXPECT_FALSE(table.TakeExpired(kStart).landing);  // Said once.
  EXPECT_TRUE(table.TakeAll().empty());
  EXPECT_NE(table.Take(id), nullptr);
  table.CheckInvariants();
}

TEST(CallTable, WhetherAnUnansweredCallRan) {
  PendingCall call;
  auto request = std::make_shared<OutMessage>(transport::Lane::kControl, 1, false);
  call.request = request;
  EXPECT_EQ(RanUnanswered(call), Ran::kNo);
  request->number = 1;
  EXPECT_EQ(RanUnanswered(call), Ran::kMaybe);
  request = nullptr;  // Acknowledged and let go.
  EXPECT_EQ(RanUnanswered(call), Ran::kMaybe);
}

TEST(ServedTable, AnswersOnceAndNobodyWhoGaveUp) {
  ServedTable table(10);
  using Admission = ServedTable::Admission;
  auto first = table.Admit(1, 1);
  EXPECT_EQ(first.admission, Admission::kRun);
  EXPECT_EQ(table.Admit(1, 1).admission, Admission::kUnwanted);
  EXPECT_TRUE(table.Answer(1));
  EXPECT_FALSE(table.Answer(1));
  auto second = table.Admit(2, 1);
  auto third = table.Admit(3, 3);  // Says that 2 is not awaited any more.
  ASSERT_EQ(third.given_up.size(), 1u);
  EXPECT_FALSE(second.stop.stop_requested());  // It is for whoever has no lock to ask it.
  third.given_up[0].request_stop();
  EXPECT_TRUE(second.stop.stop_requested());
  EXPECT_FALSE(table.Answer(2));
  EXPECT_EQ(table.Admit(2, 1).admission, Admission::kUnwanted);
  for (std::stop_source& stop : table.Cancel(3)) stop.request_stop();
  EXPECT_TRUE(third.stop.stop_requested());
  EXPECT_FALSE(table.Answer(3));
}

TEST(ServedTable, WhatWasGivenUpBeforeItCameDoesNotRun) {
  ServedTable table(10);
  using Admission = ServedTable::Admission;
  EXPECT_EQ(table.Admit(1, 1).admission, Admission::kRun);
  EXPECT_TRUE(table.Cancel(3).empty());  // By the control lane; the request is large and comes by the other.
  EXPECT_EQ(table.Admit(2, 1).admission, Admission::kRun);
  EXPECT_EQ(table.Admit(3, 1).admission, Admission::kUnwanted);
  EXPECT_FALSE(table.Answer(3));
  // One that was answered long ago is remembered until the watermark says so, and no longer.
  EXPECT_TRUE(table.Answer(2));
  EXPECT_TRUE(table.Cancel(2).empty());
  EXPECT_EQ(table.Admit(4, 4).admission, Admission::kRun);
  // The newest are kept, however many there are.
  for (uint64_t call = 5; call < 5000; ++call) EXPECT_TRUE(table.Cancel(call).empty());
  EXPECT_EQ(table.Admit(4999, 4).admission, Admission::kUnwanted);
}

TEST(CallTable, CountsOneWayCalls) {
  CallTable table;
  auto one_way = [] {
    auto call = std::make_unique<PendingCall>();
    call->one_way = true;
    return call;
  };
  uint64_t first = table.Add(one_way());
  table.Add(one_way());
  table.Add(Until(kStart));
  EXPECT_EQ(table.one_way_count(), 2u);
  EXPECT_NE(table.Take(first), nullptr);
  EXPECT_EQ(table.one_way_count(), 1u);
  table.TakeAll();
  EXPECT_EQ(table.one_way_count(), 0u);
  table.CheckInvariants();
}

TEST(ServedTable, HasALimit) {
  ServedTable table(2);
  EXPECT_EQ(table.Admit(1, 1).admission, ServedTable::Admission::kRun);
  EXPECT_EQ(table.Admit(2, 1).admission, ServedTable::Admission::kRun);
  EXPECT_EQ(table.Admit(3, 1).admission, ServedTable::Admission::kFull);
  EXPECT_EQ(table.CancelAll().size(), 2u);
  EXPECT_EQ(table.Admit(4, 1).admission, ServedTable::Admission::kRun);
}

}  // namespace
}  // namespace Atoll::rpc
