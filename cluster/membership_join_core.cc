// Who is let in: joins, and those that wait until it is known whether the member in their way lives.
#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/words.h"
#include "atoll/cluster/membership_core.h"

namespace Atoll::cluster {
namespace {

constexpr size_t kMaxRoleBytes = 32;
constexpr size_t kMaxAddressBytes = 512;
constexpr absl::string_view kAlive = "which is alive";
constexpr absl::string_view kSilent = "which does not answer but whose lease still runs";

}  // namespace

absl::Status MembershipCore::CheckJoin(const Member& member) const {
  if (!base::IsWord(member.id.name, base::kMaxMemberNameBytes)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a member's name should be of 1 to ", base::kMaxMemberNameBytes, " ", base::kWordLetters, ": '",
        absl::CHexEscape(member.id.name.substr(0, base::kMaxMemberNameBytes)), "' is not"));
  }
  if (member.id.incarnation == base::Incarnation(0)) {
    return absl::InvalidArgumentError(absl::StrCat(member.id.name, " has no incarnation"));
  }
  if (absl::Status status = CheckRank(member); !status.ok()) return status;
  if (!base::IsWord(member.role, kMaxRoleBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(member), " has no role of 1 to ", kMaxRoleBytes, " ", base::kWordLetters));
  }
  bool fit = !member.addresses.empty() && member.addresses.size() <= kMaxAddresses;
  for (const std::string& address : member.addresses) {
    fit = fit && !address.empty() && address.size() <= kMaxAddressBytes;
  }
  if (!fit) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(member), " should come with 1 to ", kMaxAddresses,
                                                   " addresses of at most ", kMaxAddressBytes, " bytes"));
  }
  for (const auto& [gone, why] : gone_) {
    if (gone.id == member.id) {
      return absl::FailedPreconditionError(absl::StrCat(
          Describe(gone), " ", why, ": it can come again as a new incarnation only (start it anew)"));
    }
  }
  return absl::OkStatus();
}

absl::Status MembershipCore::CheckRank(const Member& member) const {
  const int rank = member.rank.value();
  if (options_.world_size != kOpenWorld) {
    if (rank >= 0 && rank < options_.world_size) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(Describe(member), ": its rank should be from 0 to ",
                                                   options_.world_size - 1, ", the job has a world of ",
                                                   options_.world_size));
  }
  if (member.rank == kAnyRank || (rank >= 0 && rank < kMostRanks)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(Describe(member), ": its rank should be from 0 to ",
                                                 kMostRanks - 1, ", or ", kAnyRank.value(),
                                                 " for the lowest that is free"));
}

base::Rank MembershipCore::FreeRankFor(absl::string_view name) const {
  for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
    if (gone->first.id.name != name) continue;
    if (Live(gone->first.rank) == nullptr) return gone->first.rank;
    break;
  }
  base::Rank free(0);
  for (const auto& [rank, state] : members_) {
    if (rank != free) break;
    free = base::Rank(free.value() + 1);
  }
  return free;
}

const MembershipCore::State* MembershipCore::Conflict(const Member& member) const {
  for (const auto& [rank, state] : members_) {
    if (state.member.id.name == member.id.name || rank == member.rank) return &state;
  }
  return nullptr;
}

MembershipCore::Actions MembershipCore::Join(Member member, Token token, absl::Time deadline,
                                             absl::Time now) {
  Observe(now);
  Actions actions;
  absl::Status status = CheckJoin(member);
  if (!status.ok()) {
    actions.push_back(JoinAnswer{token, std::move(status), {}, 0, {}});
    return actions;
  }
  if (State* again = Find(member.id)) {
    if (again->member.rank != member.rank && member.rank != kAnyRank) {
      actions.push_back(
          JoinAnswer{token,
                     absl::InvalidArgumentError(
                         absl::StrCat(Describe(again->member), " cannot join as rank ", member.rank.value())),
                     {},
                     0,
                     {}});
      return actions;
    }
    Renew(*again, now);
    actions.push_back(Welcome(token));
    return actions;
  }
  const State* conflict = Conflict(member);
  if (conflict == nullptr) {
    if (member.rank == kAnyRank) member.rank = FreeRankFor(member.id.name);
    if (member.rank.value() >= kMostRanks) {
      actions.push_back(
          JoinAnswer{token,
                     absl::ResourceExhaustedError(absl::StrCat("all ", kMostRanks, " ranks are taken")),
                     {},
                     0,
                     {}});
      return actions;
    }
    Admit(std::move(member), token, now, actions);
    return actions;
  }
  // A process that was killed and started again may be here before its old self is known to be dead.
  const Member holder = conflict->member;
  PendingJoin join{std::move(member), token, deadline};
  if (IsCoordinator(holder.id)) {
    RefuseJoin(join, holder, kAlive, actions);
  } else {
    inquiries_[holder.id].joins.push_back(std::move(join));
    Ask(holder.id, actions);
  }
  return actions;
}

/// Those that waited for the place of `gone`.
void MembershipCore::JoinInPlaceOf(const Member& gone, absl::Time now, Actions& actions) {
  auto inquiry = inquiries_.find(gone.id);
  if (inquiry == inquiries_.end()) return;
  std::vector<PendingJoin> waiting = std::move(inquiry->second.joins);
  inquiries_.erase(inquiry);
  for (PendingJoin& join : waiting) {
    if (join.deadline <= now) {
      RefuseJoin(join, gone, kSilent, actions);
      continue;
    }
    for (Action& action : Join(std::move(join.member), join.token, join.deadline, now)) {
      actions.push_back(std::move(action));
    }
  }
}

void MembershipCore::Ask(const base::MemberId& suspect, Actions& actions) {
  Inquiry& inquiry = inquiries_[suspect];
  if (inquiry.asked) return;
  inquiry.asked = true;
  actions.push_back(Probe{suspect});
}

void MembershipCore::RefuseJoin(const PendingJoin& join, const Member& holder, absl::string_view how,
                                Actions& actions) {
  const bool name = join.member.id.name == holder.id.name;
  std::string text = absl::StrCat(Describe(join.member), " cannot join: ", name ? "its name" : "its rank",
                                  " belongs to ", Describe(holder), ", ", how);
  if (!holder.addresses.empty()) absl::StrAppend(&text, " at ", holder.addresses.back());
  actions.push_back(JoinAnswer{join.token, absl::AlreadyExistsError(text), {}, 0, {}});
}

MembershipCore::Actions MembershipCore::WithdrawJoin(Token token) {
  Actions actions;
  for (auto inquiry = inquiries_.begin(); inquiry != inquiries_.end(); ++inquiry) {
    std::vector<PendingJoin>& joins = inquiry->second.joins;
    auto join =
        std::find_if(joins.begin(), joins.end(), [&](const PendingJoin& one) { return one.token == token; });
    if (join == joins.end()) continue;
    joins.erase(join);
    if (joins.empty() && !inquiry->second.asked) inquiries_.erase(inquiry);
    actions.push_back(JoinAnswer{token, absl::CancelledError("who asked to join waits no more"), {}, 0, {}});
    break;
  }
  return actions;
}

/// Refuses the joins whose deadline is over.
void MembershipCore::EndJoins(absl::Time now, Actions& actions) {
  for (auto& [suspect, inquiry] : inquiries_) {
    auto late = std::stable_partition(inquiry.joins.begin(), inquiry.joins.end(),
                                      [&](const PendingJoin& join) { return join.deadline > now; });
    for (auto join = late; join != inquiry.joins.end(); ++join) {
      RefuseJoin(*join, Find(suspect)->member, kSilent, actions);
    }
    inquiry.joins.erase(late, inquiry.joins.end());
  }
}

/// Of members that did not answer a probe while joins wait for their place: who was heard of since is alive;
/// the others are asked again.
void MembershipCore::JudgeSilent(absl::Time now, Actions& actions) {
  for (auto inquiry = inquiries_.begin(); inquiry != inquiries_.end();) {
    auto& [suspect, state] = *inquiry;
    const State& holder = *Find(suspect);
    if (holder.heard > state.silent_since) {
      for (const PendingJoin& join : state.joins) RefuseJoin(join, holder.member, kAlive, actions);
      state.joins.clear();
    }
    if (state.joins.empty() && !state.asked) {
      inquiry = inquiries_.erase(inquiry);
      continue;
    }
    if (now >= state.silent_since + options_.lease / 4) Ask(suspect, actions);
    ++inquiry;
  }
}

void MembershipCore::Admit(Member member, Token token, absl::Time now, Actions& actions) {
  base::Rank rank = member.rank;
  left_.erase(rank);
  Announce(MemberEvent::Kind::kJoined, member, absl::OkStatus(), actions);
  State state;
  state.member = std::move(member);
  state.lease_end = now + options_.lease;
  state.seen = last_event_;
  members_.emplace(rank, std::move(state));
  actions.push_back(Welcome(token));
  TrimEvents(now, actions);
}

MembershipCore::JoinAnswer MembershipCore::Welcome(Token token) const {
  return {token, absl::OkStatus(), Members(), last_event_, {left_.begin(), left_.end()}};
}

MembershipCore::Actions MembershipCore::Probed(const base::MemberId& suspect, ProbeResult result,
                                               const std::string& what, absl::Time now) {
  Observe(now);
  Actions actions;
  State* state = Find(suspect);
  auto inquiry = inquiries_.find(suspect);
  if (state == nullptr || inquiry == inquiries_.end()) return actions;  // Gone meanwhile: Remove saw to it.
  inquiry->second.asked = false;
  if (result == ProbeResult::kDead) {
    Remove(suspect, MemberEvent::Kind::kDead, absl::StrCat("seen by ", coordinator_.name, ": ", what), now,
           actions);
  } else if (result == ProbeResult::kAlive) {
    Renew(*state, now);
    for (const PendingJoin& join : inquiry->second.joins) RefuseJoin(join, state->member, kAlive, actions);
    inquiries_.erase(inquiry);
  } else if (inquiry->second.joins.empty()) {
    inquiries_.erase(inquiry);  // Its lease decides.
  } else {
    inquiry->second.silent_since = now;
  }
  return actions;
}

}  // namespace Atoll::cluster
