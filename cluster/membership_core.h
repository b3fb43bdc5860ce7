// Who is in the job: decided here, on the coordinator, without I/O. An event and the time go in, actions come
// out; rpc/membership.cc carries them out. Every order of events can so be tried in milliseconds.
//
//   join ──> [conflict with a live member: probe it first] ──> member ──leave──────────> left
//                │ alive: refused                              │  renews its lease by whatever it sends
//                └ no answer: waits for its lease's end        └──lease ends, or seen to die──> dead
//
// Each change is an event with a number; members fetch them in order by Poll(after), so none is lost, none
// comes twice, and a slow member is caught up.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "atoll/cluster/gather_core.h"
#include "atoll/cluster/member.h"

namespace Atoll::cluster {

/// Not thread-safe. Times given to it never go back.
class MembershipCore : private GatherCore::Roster {
 public:
  using Token = GatherCore::Token;  ///< Names a call that waits for its answer; the caller's to choose.
  static constexpr size_t kMaxAddresses = 16;  ///< Of a member; transport's endpoints list no more.
  static constexpr int kMostRanks = 1 << 20;   ///< Of an open world.
  struct Options {
    int world_size = 1;  ///< Or kOpenWorld.
    absl::Duration lease = absl::Seconds(10);
    absl::Duration poll_hold = absl::Seconds(20);  ///< A poll without news is answered then.
    size_t max_events = 1 << 16;                   ///< A member that is further behind is declared dead.
    size_t max_events_an_answer = 1024;
    size_t max_bytes_an_answer =
        1 << 20;             ///< Of its events. It fits into a message; the next poll has the rest.
    size_t max_gone = 4096;  ///< Of the dead and the left, so many are remembered.
  };

  struct JoinAnswer {
    Token token = 0;
    absl::Status status;
    std::vector<Member> members;   ///< Live ones, the new one among them, by rank.
    uint64_t event = 0;            ///< What `members` and `left` include: poll after it.
    std::vector<base::Rank> left;  ///< Of a fixed world: whose members were there, and left in order.
  };
  struct PollAnswer {
    Token token = 0;
    absl::Status status;
    std::vector<MemberEvent> events;
  };
  using GatherAnswer = GatherCore::Answer;
  /// Ask `suspect` whether it lives, and tell Probed.
  struct Probe {
    base::MemberId suspect;
  };
  using Action = std::variant<JoinAnswer, PollAnswer, GatherAnswer, Probe>;
  using Actions = std::vector<Action>;

  /// `coordinator` is the first member, and has no lease.
  MembershipCore(Options options, Member coordinator, absl::Time now);

  /// Answered with AlreadyExists (the name or rank belongs to a live member, which was probed; both are
  /// named), InvalidArgument (rank, name, role or addresses that cannot be), FailedPrecondition (this
  /// incarnation was a member before), or the members. A repeated join of a member is answered again. In an open
  /// world kAnyRank is replaced: by the rank that the name had before, if it is free, or the lowest that is.
  /// While a member in its way does not answer the probe (its process may have died with its host), it waits
  /// for that member's lease to end, at most until `deadline`: then AlreadyExists too.
  Actions Join(Member member, Token token, absl::Time deadline, absl::Time now);
  /// Whoever asked with `token` waits no more: a join that was not decided yet is answered with Cancelled and
  /// leaves nothing.
  Actions WithdrawJoin(Token token);
  /// Renews the lease. FailedPrecondition: it is no longer a member, and why; NotFound: it never was.
  absl::Status Heartbeat(const base::MemberId& id, absl::Time now);
  /// Something else of it came in, at `when`, which may be past: that counts as life too.
  void Heard(const base::MemberId& id, absl::Time when);
  /// Those whose lease Tick(now) would end: what else was heard of them is to be told first.
  std::vector<base::MemberId> Late(absl::Time now) const;
  /// Answered as soon as there is an event after `after`. A newer poll of the same member ends an older one.
  Actions Poll(const base::MemberId& id, uint64_t after, Token token, absl::Time now);
  /// Leaves, in order or (`why` is not empty) because it failed. Who is no member needs not.
  Actions Leave(const base::MemberId& id, absl::Time now, const std::string& why = "");

  enum class Evidence {
    kSeen,         ///< Its process is gone: its address refuses, or another incarnation answers there.
    kUnreachable,  ///< `reporter` does not reach it: its own network may be to blame.
  };
  /// `reporter`'s agent says that `suspect` died. Declared dead at once if the coordinator itself says so or
  /// it was seen; else the coordinator probes it.
  Actions ReportDead(const base::MemberId& reporter, const base::MemberId& suspect, Evidence evidence,
                     const std::string& what, absl::Time now);
  enum class ProbeResult { kAlive, kDead, kNoAnswer };
  Actions Probed(const base::MemberId& suspect, ProbeResult result, const std::string& what, absl::Time now);

  /// See rpc::Membership::AllGather. Of an open world "all" are those who are there when it begins. Errors of the caller (no member) are FailedPrecondition or NotFound.
  Actions Gather(const base::MemberId& id, std::string name, std::vector<std::string> participants,
                 std::string value, absl::Duration limit, Token token, absl::Time now);

  /// Ends leases, gathers and polls that are due. To be called at NextTick() or before: after a silence of
  /// more than half a lease it takes it that this process was stopped, and extends every lease by that time,
  /// since its members' heartbeats are still in the queues.
  Actions Tick(absl::Time now);
  absl::Time NextTick() const;

  /// Live members by rank.
  std::vector<Member> Members() const;
  uint64_t last_event() const { return last_event_; }
  /// Empty, or the first invariant that does not hold. For tests and debug builds.
  std::string BrokenInvariant() const;

 private:
  struct State {
    Member member;
    absl::Time lease_end;
    absl::Time heard = absl::InfinitePast();
    uint64_t seen = 0;  ///< It has every event up to here.
    std::optional<Token> poll;
    absl::Time poll_end;
  };
  struct PendingJoin {
    Member member;
    Token token;
    absl::Time deadline;
  };
  /// Whether a member lives, and who waits for its place.
  struct Inquiry {
    bool asked = false;                                ///< A probe is under way.
    absl::Time silent_since = absl::InfiniteFuture();  ///< The last probe had no answer then.
    std::vector<PendingJoin> joins;
  };

  int world_size() const override { return options_.world_size; }
  std::vector<base::Rank> LiveRanks() const override;
  const Member* Live(base::Rank rank) const override;
  const Member* Live(absl::string_view name) const override;
  std::optional<std::string> WhyGone(base::Rank rank) const override;
  std::optional<std::string> WhyGone(absl::string_view name) const override;

  void Observe(absl::Time now);
  State* Find(const base::MemberId& id);
  void Renew(State& state, absl::Time now);
  absl::Status NotAMember(const base::MemberId& id) const;
  absl::Status CheckJoin(const Member& member) const;
  absl::Status CheckRank(const Member& member) const;
  base::Rank FreeRankFor(absl::string_view name) const;
  const State* Conflict(const Member& member) const;
  void Ask(const base::MemberId& suspect, Actions& actions);
  void RefuseJoin(const PendingJoin& join, const Member& holder, absl::string_view how, Actions& actions);
  void JoinInPlaceOf(const Member& gone, absl::Time now, Actions& actions);
  void EndJoins(absl::Time now, Actions& actions);
  void JudgeSilent(absl::Time now, Actions& actions);
  void Admit(Member member, Token token, absl::Time now, Actions& actions);
  JoinAnswer Welcome(Token token) const;
  void Announce(MemberEvent::Kind kind, const Member& member, absl::Status reason, Actions& actions);
  void Remove(base::MemberId id, MemberEvent::Kind kind, const std::string& what, absl::Time now,
              Actions& actions);
  void AnswerPoll(State& state, absl::Status status, Actions& actions);
  void TrimEvents(absl::Time now, Actions& actions);
  bool IsCoordinator(const base::MemberId& id) const { return id == coordinator_; }

  const Options options_;
  const base::MemberId coordinator_;
  GatherCore gathers_;
  std::map<base::Rank, State> members_;
  std::set<base::Rank> left_;                    ///< Of a fixed world: whose last member left in order.
  std::map<base::MemberId, Inquiry> inquiries_;  ///< By suspect.
  std::deque<MemberEvent> events_;               ///< The last ones, up to last_event_.
  uint64_t last_event_ = 0;
  std::deque<std::pair<Member, std::string>> gone_;  ///< With why, the latest last.
  absl::Time observed_;
};

}  // namespace Atoll::cluster
