// Drives a MembershipCore: carries out its actions, checks its invariants after each event, that each call is
// answered exactly once, and that what members are told adds up to what the core says.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "atoll/base/clock.h"
#include "atoll/cluster/membership_core.h"

namespace Atoll::cluster {

inline Member MakeMember(const std::string& name, uint64_t incarnation, int rank) {
  Member member;
  member.id = {name, base::Incarnation(incarnation)};
  member.rank = base::Rank(rank);
  member.role = "worker";
  member.addresses = {absl::StrCat("127.0.0.1:", 1000 + rank)};
  return member;
}

class Script {
 public:
  explicit Script(int world, MembershipCore::Options options = {})
      : core_((options.world_size = world, options), MakeMember("c", 1, 0), clock_.Now()) {
    views_[MakeMember("c", 1, 0).id] = {1, {{0, "c"}}};
  }

  // Each returns the token of the call.
  uint64_t Join(const Member& member, absl::Duration limit = absl::Seconds(60)) {
    uint64_t token = NewToken();
    joins_[token] = member.id;
    Run(core_.Join(member, token, clock_.Now() + limit, clock_.Now()));
    return token;
  }
  void Withdraw(uint64_t join) { Run(core_.WithdrawJoin(join)); }
  uint64_t Poll(const base::MemberId& id) {
    uint64_t token = NewToken();
    polls_[token] = id;
    auto view = views_.find(id);
    Run(core_.Poll(id, view == views_.end() ? 0 : view->second.seen, token, clock_.Now()));
    return token;
  }
  uint64_t Gather(const base::MemberId& id, const std::string& name, const std::string& value,
                  std::vector<std::string> participants = {}, absl::Duration limit = absl::Seconds(5)) {
    uint64_t token = NewToken();
    Run(core_.Gather(id, name, std::move(participants), value, limit, token, clock_.Now()));
    return token;
  }
  absl::Status Heartbeat(const base::MemberId& id) {
    absl::Status status = core_.Heartbeat(id, clock_.Now());
    Check();
    return status;
  }
  void Heard(const base::MemberId& id, absl::Duration ago) {
    core_.Heard(id, clock_.Now() - ago);
    Check();
  }
  void Leave(const base::MemberId& id, const std::string& why = "") {
    Run(core_.Leave(id, clock_.Now(), why));
  }
  void Report(const base::MemberId& from, const base::MemberId& suspect, MembershipCore::Evidence evidence) {
    Run(core_.ReportDead(from, suspect, evidence, "refused", clock_.Now()));
  }
  void Probed(base::MemberId suspect, MembershipCore::ProbeResult result) {
    probes_.erase(suspect);
    Run(core_.Probed(suspect, result, "refused", clock_.Now()));
  }
  /// Time passes as on a coordinator that is not stopped: it ticks when it should.
  void Advance(absl::Duration by) {
    absl::Time end = clock_.Now() + by;
    while (clock_.Now() < end) {
      absl::Time next = std::min(end, std::max(core_.NextTick(), clock_.Now() + absl::Nanoseconds(1)));
      clock_.Advance(next - clock_.Now());
      Run(core_.Tick(clock_.Now()));
    }
  }
  /// The coordinator is stopped for so long.
  void Stall(absl::Duration by) {
    clock_.Advance(by);
    Run(core_.Tick(clock_.Now()));
  }

  /// The answer to a call; fails the test if there is none yet.
  absl::Status Status(uint64_t token) {
    EXPECT_TRUE(answers_.count(token)) << "call " << token << " is not answered";
    return answers_[token];
  }
  bool Answered(uint64_t token) const { return answers_.count(token) > 0; }
  std::vector<std::string> Values(uint64_t token) {
    EXPECT_TRUE(Status(token).ok()) << Status(token);
    return values_[token];
  }
  const std::vector<MemberEvent>& Events(uint64_t token) { return events_[token]; }
  const std::set<base::MemberId>& probes() const { return probes_; }
  std::vector<std::string> Live() const {
    std::vector<std::string> live;
    for (const Member& member : core_.Members()) live.push_back(member.id.name);
    return live;
  }
  MembershipCore& core() { return core_; }
  base::FakeClock& clock() { return clock_; }
  uint64_t calls() const { return tokens_; }

  /// Ends everything that is under way; then each call has its one answer, and each live member, having
  /// polled, knows exactly who is there.
  void Finish() {
    while (!probes_.empty()) Probed(*probes_.begin(), MembershipCore::ProbeResult::kAlive);
    for (uint64_t token = 1; token <= tokens_; ++token) {
      if (joins_.count(token) && !Answered(token)) Withdraw(token);
    }
    for (const Member& member : core_.Members()) Poll(member.id);
    for (const Member& member : core_.Members()) {
      std::map<int, std::string> truth;
      for (const Member& one : core_.Members()) truth[one.rank.value()] = one.id.name;
      EXPECT_EQ(views_[member.id].members, truth) << member.id.ToString();
    }
    Advance(absl::Minutes(2));  // All leases, polls and gathers end but the coordinator's own.
    EXPECT_EQ(core_.Members().size(), 1u);
    for (uint64_t token = 1; token <= tokens_; ++token) {
      EXPECT_TRUE(Answered(token)) << "call " << token << " was never answered";
    }
  }

 private:
  struct View {
    uint64_t seen = 0;
    std::map<int, std::string> members;
  };

  uint64_t NewToken() { return ++tokens_; }

  void Answer(uint64_t token, const absl::Status& status) {
    EXPECT_TRUE(answers_.emplace(token, status).second) << "call " << token << " is answered twice";
  }
  void Run(MembershipCore::Actions actions) {
    for (auto& action : actions) {
      std::visit([this](auto& one) { Do(one); }, action);
    }
    Check();
  }
  void Check() { EXPECT_EQ(core_.BrokenInvariant(), ""); }

  void Do(const MembershipCore::JoinAnswer& answer) {
    Answer(answer.token, answer.status);
    if (!answer.status.ok()) return;
    View& view = views_[joins_[answer.token]];
    if (answer.event < view.seen) return;  // An answer that was overtaken by its repetition.
    view = {answer.event, {}};
    for (const Member& member : answer.members) view.members[member.rank.value()] = member.id.name;
  }
  void Do(const MembershipCore::PollAnswer& answer) {
    Answer(answer.token, answer.status);
    events_[answer.token] = answer.events;
    View& view = views_[polls_[answer.token]];
    for (const MemberEvent& event : answer.events) {
      EXPECT_EQ(event.number, view.seen + 1) << "lost, repeated or out of order";
      view.seen = event.number;
      if (event.kind == MemberEvent::Kind::kJoined) {
        EXPECT_TRUE(view.members.emplace(event.member.rank.value(), event.member.id.name).second);
      } else {
        EXPECT_EQ(view.members.erase(event.member.rank.value()), 1u);
      }
      EXPECT_TRUE(event.kind == MemberEvent::Kind::kLeft ||
                  event.reason.ok() == (event.kind == MemberEvent::Kind::kJoined));
    }
  }
  void Do(const MembershipCore::GatherAnswer& answer) {
    Answer(answer.token, answer.status);
    EXPECT_EQ(answer.values != nullptr, answer.status.ok());
    if (answer.values != nullptr) values_[answer.token] = *answer.values;
  }
  void Do(const MembershipCore::Probe& probe) { EXPECT_TRUE(probes_.insert(probe.suspect).second); }

  base::FakeClock clock_;
  MembershipCore core_;
  uint64_t tokens_ = 0;
  std::map<uint64_t, base::MemberId> joins_, polls_;
  std::map<uint64_t, absl::Status> answers_;
  std::map<uint64_t, std::vector<std::string>> values_;
  std::map<uint64_t, std::vector<MemberEvent>> events_;
  std::map<base::MemberId, View> views_;
  std::set<base::MemberId> probes_;
};

}  // namespace Atoll::cluster
