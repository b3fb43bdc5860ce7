// One session core, by hand.
#include "atoll/rpc/session_core.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "session_core_testing.h"

namespace Atoll::rpc {
namespace {

using Lane = transport::Lane;
using Action = SessionCore::Action;

class OneCore : public ::testing::Test {
 protected:
  std::vector<Action> Take() {
    core_.CheckInvariants();
    return core_.TakeActions();
  }
  std::shared_ptr<TestMessage> Post(size_t bytes, Lane lane = Lane::kControl) {
    auto message = std::make_shared<TestMessage>(lane, bytes, "m");
    EXPECT_TRUE(core_.Post(message, now_).ok());
    return message;
  }
  void Open(Lane lane = Lane::kControl, SessionCore::PipeId pipe = 7) {
    core_.Probe(now_);
    Take();
    core_.OnHello(pipe, lane, false, Hello{99, 0, {}}, {0, 0}, now_);
    Take();
    ASSERT_TRUE(core_.open(lane));
  }
  static int Count(const std::vector<Action>& actions, Action::Kind kind) {
    int count = 0;
    for (const Action& action : actions) count += action.kind == kind;
    return count;
  }

  SessionCore::Options options_ = [] {
    SessionCore::Options options = Defaults();
    options.window_bytes = 100;
    options.queue_bytes = 200;
    return options;
  }();
  SessionCore core_{options_};
  absl::Time now_ = absl::UnixEpoch();
};

TEST_F(OneCore, TheWindowCountsWhatIsNotReceivedAndReplyIsNotNeeded) {
  Open();
  Post(60);
  Post(60);  // Waits: 120 would be in flight.
  Post(10);  // And stays behind it.
  EXPECT_EQ(Count(Take(), Action::Kind::kWrite), 1);
  ASSERT_TRUE(core_.OnAcks({1, 0}, now_).ok());
  std::vector<Action> actions = Take();
  EXPECT_EQ(Count(actions, Action::Kind::kAcked), 1);
  EXPECT_EQ(Count(actions, Action::Kind::kWrite), 2);
}

TEST_F(OneCore, OneMessageAboveTheWindowIsAdmitted) {
  Open();
  Post(1000);
  EXPECT_EQ(Count(Take(), Action::Kind::kWrite), 1);
}

TEST_F(OneCore, TheQueueHasALimit) {
  Open();
  Post(100);
  Post(150);
  auto refused = std::make_shared<TestMessage>(Lane::kControl, 100, "m");
  EXPECT_TRUE(absl::IsResourceExhausted(core_.Post(refused, now_)));
  EXPECT_TRUE(core_.Post(refused, now_, /*force=*/true).ok());
}

TEST_F(OneCore, LanesHaveWindowsOfTheirOwn) {
  Open();
  core_.OnHello(8, Lane::kBulk, false, Hello{1, 0, {}}, {0, 0}, now_);
  Take();
  Post(100, Lane::kBulk);
  Post(100, Lane::kBulk);
  Post(50, Lane::kControl);
  std::vector<Action> actions = Take();
  ASSERT_EQ(Count(actions, Action::Kind::kWrite), 2);
  EXPECT_EQ(actions[1].lane, Lane::kControl);
}

TEST_F(OneCore, AnAcknowledgementOfTheFutureIsRefused) {
  Open();
  Post(10);
  EXPECT_TRUE(absl::IsInvalidArgument(core_.OnAcks({2, 0}, now_)));
}

TEST_F(OneCore, AcknowledgementsAreDelayedOrForced) {
  Open();
  EXPECT_TRUE(core_.OnReceived(Lane::kControl, 1, 10, false, now_));
  EXPECT_EQ(Take().size(), 0u);
  EXPECT_EQ(core_.NextTimer(), now_ + options_.ack_delay);
  // What flows back carries it.
  Post(10);
  std::vector<Action> actions = Take();
  EXPECT_EQ(actions[0].acks[0], 1u);
  EXPECT_GE(core_.NextTimer(), now_ + options_.stall_limit);
  EXPECT_TRUE(core_.OnReceived(Lane::kControl, 2, 10, false, now_));
  core_.OnTimer(now_ + options_.ack_delay);
  actions = Take();
  ASSERT_EQ(Count(actions, Action::Kind::kAck), 1);
  EXPECT_EQ(actions[0].acks[0], 2u);
  EXPECT_TRUE(core_.OnReceived(Lane::kControl, 3, 10, true, now_));
  EXPECT_EQ(Count(Take(), Action::Kind::kAck), 1);
  EXPECT_FALSE(core_.OnReceived(Lane::kControl, 3, 10, true, now_));
  for (int i = 0; i < options_.ack_every; ++i) core_.OnReceived(Lane::kControl, 4 + i, 10, false, now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kAck), 1);
}

TEST_F(OneCore, APipeThatAcknowledgesNothingIsMadeAnew) {
  Open();
  EXPECT_EQ(core_.NextTimer(), absl::InfiniteFuture());
  const size_t bytes = 2 * options_.stall_rate;  // Two seconds more.
  Post(bytes);
  const absl::Time limit = now_ + options_.stall_limit + absl::Seconds(2);
  EXPECT_EQ(core_.NextTimer(), limit);
  // More of it asks for no earlier answer; an acknowledgement begins anew.
  now_ += options_.stall_limit;
  Post(10);
  EXPECT_EQ(core_.NextTimer(), limit);
  ASSERT_TRUE(core_.OnAcks({1, 0}, now_).ok());
  Take();
  const absl::Time next = core_.NextTimer();
  EXPECT_GE(next, now_ + options_.stall_limit);
  EXPECT_LT(next, now_ + options_.stall_limit + absl::Seconds(1));
  core_.OnTimer(next - absl::Nanoseconds(1));
  EXPECT_EQ(Count(Take(), Action::Kind::kClose), 0);
  core_.OnTimer(next);
  const std::vector<Action> actions = Take();
  ASSERT_EQ(Count(actions, Action::Kind::kClose), 1);
  for (const Action& action : actions) {
    EXPECT_EQ(action.kind == Action::Kind::kClose, absl::IsDeadlineExceeded(action.status));
  }
  EXPECT_FALSE(core_.dead());
  EXPECT_FALSE(core_.open(Lane::kControl));
  EXPECT_EQ(core_.unacked_count(), 1u);
  // Once all is acknowledged nothing is watched.
  core_.OnHello(9, Lane::kControl, false, Hello{100, 0, {}}, {2, 0}, next);
  Take();
  EXPECT_TRUE(core_.drained());
  EXPECT_EQ(core_.NextTimer(), absl::InfiniteFuture());
}

TEST_F(OneCore, ASlowLinkGetsTwiceTheTimeAfterEachStallUntilSomethingArrives) {
  Open();
  Post(1);
  for (int stalls = 0; stalls < 3; ++stalls) {
    Take();
    const absl::Duration limit = core_.NextTimer() - now_;
    EXPECT_GE(limit, options_.stall_limit * (1 << stalls));
    EXPECT_LT(limit, options_.stall_limit * (1 << stalls) + absl::Seconds(1));
    now_ += limit;
    core_.OnTimer(now_);
    core_.OnHello(9 + stalls, Lane::kControl, false, Hello{100u + stalls, 0, {}}, {0, 0}, now_);
    ASSERT_TRUE(core_.open(Lane::kControl));
  }
  ASSERT_TRUE(core_.OnAcks({1, 0}, now_).ok());
  Post(1);
  EXPECT_LT(core_.NextTimer(), now_ + options_.stall_limit + absl::Seconds(1));
}

TEST_F(OneCore, ThePipeThatItAskedForMeetsNoneOfItsOwn) {
  options_.wins_ties = true;
  core_ = SessionCore(options_);
  core_.OnHello(7, Lane::kControl, false, Hello{99, 0, {}}, {0, 0}, now_);
  Take();
  Post(10, Lane::kBulk);
  std::vector<Action> actions = Take();
  ASSERT_EQ(Count(actions, Action::Kind::kConnect), 1);
  core_.OnConnectFailed(Lane::kBulk, actions[0].attempt, SessionCore::Failure::kTransient,
                        absl::UnavailableError("away"), now_);
  actions = Take();
  ASSERT_EQ(Count(actions, Action::Kind::kAck), 1);
  EXPECT_TRUE(actions[0].open_bulk);
  now_ += options_.asked_wait - absl::Milliseconds(1);
  core_.OnTimer(now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kConnect), 0);
  core_.OnHello(8, Lane::kBulk, false, Hello{1, 0, {}}, {0, 0}, now_);
  EXPECT_TRUE(core_.open(Lane::kBulk));
  EXPECT_EQ(Count(Take(), Action::Kind::kWrite), 1);
}

TEST_F(OneCore, AsksInARowAreOneConnectAndNoDeath) {
  Open();
  core_.OnAskedForBulk(now_);
  std::vector<Action> actions = Take();
  ASSERT_EQ(Count(actions, Action::Kind::kConnect), 1);
  core_.OnConnectFailed(Lane::kBulk, actions[0].attempt, SessionCore::Failure::kTransient,
                        absl::UnavailableError("away"), now_);
  Take();
  core_.OnAskedForBulk(now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kConnect), 0);
  now_ += options_.asked_wait;
  core_.OnAskedForBulk(now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kConnect), 1);
  core_.OnTimer(now_ + 2 * options_.reconnect_limit);  // The connect takes its time.
  EXPECT_FALSE(core_.dead());
}

TEST_F(OneCore, WithdrawnMessagesLeaveNoGap) {
  auto unsent = Post(10);
  EXPECT_TRUE(core_.Withdraw(unsent.get(), now_));
  Open();
  auto first = Post(10);
  auto second = Post(10);
  Take();
  EXPECT_FALSE(core_.Withdraw(first.get(), now_));
  core_.OnPipeClosed(7, absl::UnavailableError("cut"), now_);
  core_.OnHello(9, Lane::kControl, false, Hello{100, 0, {}}, {0, 0}, now_);
  std::vector<std::pair<uint64_t, bool>> writes;
  for (const Action& action : Take()) {
    if (action.kind == Action::Kind::kWrite) writes.emplace_back(action.number, action.message != nullptr);
  }
  EXPECT_EQ(writes, (std::vector<std::pair<uint64_t, bool>>{{1, false}, {2, true}}));
  ASSERT_TRUE(core_.OnAcks({2, 0}, now_).ok());
  EXPECT_TRUE(core_.drained());
  EXPECT_FALSE(core_.Withdraw(second.get(), now_));
}

TEST(SessionCore, WithoutAPipeAndAnAddressThePeerIsOutOfReach) {
  const absl::Time now = absl::UnixEpoch();
  SessionCore::Options options = Defaults();
  options.can_connect = false;
  SessionCore core(options);
  EXPECT_FALSE(core.reachable());
  core.OnHello(7, Lane::kControl, false, Hello{99, 0, {}}, {0, 0}, now);
  EXPECT_TRUE(core.reachable());
  core.OnPipeClosed(7, absl::UnavailableError("cut"), now);
  EXPECT_FALSE(core.reachable());
  core.SetCanConnect(now);
  EXPECT_TRUE(core.reachable());
}

TEST_F(OneCore, TwoRefusalsInARowAreDeath) {
  auto message = Post(10);
  Take();
  core_.OnConnectFailed(Lane::kControl, 1, SessionCore::Failure::kRefused, absl::UnavailableError("refused"),
                        now_);
  EXPECT_FALSE(core_.dead());
  now_ = core_.NextTimer();
  core_.OnTimer(now_);
  Take();
  core_.OnConnectFailed(Lane::kControl, 2, SessionCore::Failure::kRefused, absl::UnavailableError("refused"),
                        now_);
  EXPECT_TRUE(core_.dead());
  std::vector<Action> actions = Take();
  EXPECT_EQ(Count(actions, Action::Kind::kDropped), 1);
  EXPECT_FALSE(actions[0].sent);
  EXPECT_EQ(actions.back().kind, Action::Kind::kDead);
  EXPECT_TRUE(absl::IsUnavailable(core_.Post(message, now_)));
}

TEST_F(OneCore, AnotherIncarnationIsDeathAtOnce) {
  Post(10);
  Take();
  core_.OnConnectFailed(Lane::kControl, 1, SessionCore::Failure::kFatal, absl::NotFoundError("it is b#2"),
                        now_);
  EXPECT_TRUE(core_.dead());
}

TEST_F(OneCore, ReconnectingHasALimit) {
  Open();
  Post(10);
  Take();
  core_.OnPipeClosed(7, absl::UnavailableError("cut"), now_);
  absl::Time cut = now_;
  uint64_t attempt = 0;
  while (!core_.dead()) {
    ASSERT_LE(now_, cut + options_.reconnect_limit);
    for (const Action& action : Take()) {
      if (action.kind == Action::Kind::kConnect) attempt = action.attempt;
    }
    core_.OnConnectFailed(Lane::kControl, attempt, SessionCore::Failure::kTransient,
                          absl::UnavailableError("unreachable"), now_);
    now_ = core_.NextTimer();
    core_.OnTimer(now_);
  }
  EXPECT_EQ(now_, cut + options_.reconnect_limit);
  EXPECT_GT(attempt, 5u);
  EXPECT_LT(attempt, 100u);
  EXPECT_TRUE(absl::StrContains(core_.death().message(), "unreachable"));
  std::vector<Action> actions = Take();
  EXPECT_EQ(Count(actions, Action::Kind::kDropped), 1);
}

// The other side lacks what a pipe needs further on.
TEST_F(OneCore, PipesThatOpenAndCarryNothingAreAsNone) {
  Post(10);
  const absl::Time begin = now_;
  SessionCore::PipeId pipe = 20;
  int connects = 0;
  // With every action that it asks for done at once, until it is dead, or `carries` pipes have carried something.
  auto run = [&](int carries) {
    while (!core_.dead() && now_ < begin + absl::Hours(1)) {
      for (const Action& action : Take()) {
        if (action.kind != Action::Kind::kConnect) continue;
        ++connects;
        core_.OnConnected(Lane::kControl, action.attempt, ++pipe, now_);
        core_.OnHello(pipe, Lane::kControl, true, Hello{1, 0, {}}, {0, 0}, now_);
        if (carries > 0)
          EXPECT_TRUE(
              core_.OnReceived(Lane::kControl, core_.last_received(Lane::kControl) + 1, 1, true, now_));
        core_.OnPipeClosed(pipe, absl::UnavailableError("the last attempt"), now_ + absl::Milliseconds(10));
        if (carries > 0 && --carries == 0) return;
      }
      if (core_.has_actions()) continue;
      now_ = std::min(core_.NextTimer(), begin + absl::Hours(1));
      core_.OnTimer(now_);
    }
  };
  run(100);
  EXPECT_FALSE(core_.dead());
  EXPECT_EQ(connects, 100);
  connects = 0;
  const absl::Time last_carried = now_;
  run(0);
  EXPECT_TRUE(core_.dead());
  EXPECT_EQ(now_, last_carried + absl::Milliseconds(10) + options_.reconnect_limit);
  EXPECT_LT(connects, 30);
  EXPECT_TRUE(absl::StrContains(core_.death().message(), "the last attempt")) << core_.death();
}

TEST_F(OneCore, AGreetingThatNeverComesEndsThePipe) {
  Post(10);
  Take();
  core_.OnConnected(Lane::kControl, 1, 5, now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kHello), 1);
  now_ += options_.greeting_limit;
  core_.OnTimer(now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kClose), 1);
  EXPECT_FALSE(core_.dead());
}

TEST_F(OneCore, AStalePipeIsReadNoMore) {
  Open();
  core_.OnHello(9, Lane::kControl, false, Hello{100, 0, {}}, {0, 0}, now_);
  EXPECT_EQ(Count(Take(), Action::Kind::kClose), 1);
  EXPECT_EQ(core_.OnAnnounced(7, Lane::kControl, 1), SessionCore::Verdict::kStale);
  EXPECT_EQ(core_.OnAnnounced(9, Lane::kControl, 1), SessionCore::Verdict::kNew);
  EXPECT_EQ(core_.OnAnnounced(9, Lane::kControl, 2), SessionCore::Verdict::kGap);
  EXPECT_EQ(core_.OnAnnounced(9, Lane::kControl, 0), SessionCore::Verdict::kGap);
  // An attempt that is older than the one in place.
  core_.OnHello(10, Lane::kControl, false, Hello{100, 0, {}}, {0, 0}, now_);
  EXPECT_EQ(core_.pipe(Lane::kControl), 9u);
}

}  // namespace
}  // namespace Atoll::rpc
