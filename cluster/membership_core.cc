#include "atoll/cluster/membership_core.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "atoll/base/text.h"

namespace Atoll::cluster {
namespace {

/// About what `event` takes in a message.
size_t BytesOf(const MemberEvent& event) {
  size_t bytes = 64 + event.member.id.name.size() + event.member.role.size() + event.reason.message().size();
  for (const std::string& address : event.member.addresses) bytes += 4 + address.size();
  return bytes;
}

template <class Answers>
void Append(Answers answers, MembershipCore::Actions& actions) {
  for (auto& answer : answers) actions.push_back(std::move(answer));
}

}  // namespace

MembershipCore::MembershipCore(Options options, Member coordinator, absl::Time now)
    : options_(options), coordinator_(coordinator.id), gathers_(this), observed_(now) {
  State state;
  state.lease_end = absl::InfiniteFuture();
  state.seen = 1;
  state.member = std::move(coordinator);
  Actions none;
  Announce(MemberEvent::Kind::kJoined, state.member, absl::OkStatus(), none);
  base::Rank rank = state.member.rank;
  members_.emplace(rank, std::move(state));
}

const Member* MembershipCore::Live(base::Rank rank) const {
  auto found = members_.find(rank);
  return found == members_.end() ? nullptr : &found->second.member;
}

std::vector<base::Rank> MembershipCore::LiveRanks() const {
  std::vector<base::Rank> ranks;
  for (const auto& [rank, state] : members_) ranks.push_back(rank);
  return ranks;
}

const Member* MembershipCore::Live(absl::string_view name) const {
  for (const auto& [rank, state] : members_) {
    if (state.member.id.name == name) return &state.member;
  }
  return nullptr;
}

std::optional<std::string> MembershipCore::WhyGone(base::Rank rank) const {
  if (Live(rank) != nullptr) return std::nullopt;
  for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
    if (gone->first.rank == rank) return absl::StrCat(Describe(gone->first), " ", gone->second);
  }
  return std::nullopt;
}

std::optional<std::string> MembershipCore::WhyGone(absl::string_view name) const {
  if (Live(name) != nullptr) return std::nullopt;
  for (auto gone = gone_.rbegin(); gone != gone_.rend(); ++gone) {
    if (gone->first.id.name == name) return absl::StrCat(Describe(gone->first), " ", gone->second);
  }
  return std::nullopt;
}

void MembershipCore::Observe(absl::Time now) {
  absl::Duration silence = now - observed_;
  if (silence > options_.lease / 2) {
    for (auto& [rank, state] : members_) state.lease_end += silence;  // InfiniteFuture stays.
  }
  observed_ = std::max(observed_, now);
}

MembershipCore::State* MembershipCore::Find(const base::MemberId& id) {
  for (auto& [rank, state] : members_) {
    if (state.member.id == id) return &state;
  }
  return nullptr;
}

void MembershipCore::Renew(State& state, absl::Time now) {
  state.heard = now;
  if (!IsCoordinator(state.member.id)) state.lease_end = now + options_.lease;
}

absl::Status MembershipCore::NotAMember(const base::MemberId& id) const {
  for (const auto& [member, why] : gone_) {
    if (member.id == id) {
      return absl::FailedPreconditionError(
          absl::StrCat(Describe(member), " is no longer in the job: it ", why));
    }
  }
  return absl::NotFoundError(absl::StrCat(id.ToString(), " is not a member of the job"));
}

void MembershipCore::Announce(MemberEvent::Kind kind, const Member& member, absl::Status reason,
                              Actions& actions) {
  MemberEvent event;
  event.kind = kind;
  event.member = member;
  event.reason = std::move(reason);
  event.number = ++last_event_;
  events_.push_back(std::move(event));
  for (auto& [rank, state] : members_) AnswerPoll(state, absl::OkStatus(), actions);
}

void MembershipCore::AnswerPoll(State& state, absl::Status status, Actions& actions) {
  if (!state.poll.has_value()) return;
  PollAnswer answer;
  answer.token = *state.poll;
  answer.status = std::move(status);
  if (answer.status.ok()) {
    size_t bytes = 0;
    for (const MemberEvent& event : events_) {
      if (event.number <= state.seen) continue;
      bytes += BytesOf(event);
      const bool full = answer.events.size() == options_.max_events_an_answer ||
                        (bytes > options_.max_bytes_an_answer && !answer.events.empty());
      if (full) break;
      answer.events.push_back(event);
    }
  }
  state.poll.reset();
  actions.push_back(std::move(answer));
}

void MembershipCore::Remove(base::MemberId id, MemberEvent::Kind kind, const std::string& what,
                            absl::Time now, Actions& actions) {
  State* found = Find(id);
  if (found == nullptr) return;
  State state = std::move(*found);
  members_.erase(state.member.rank);
  std::string why = "has left";
  if (kind == MemberEvent::Kind::kDead) {
    why = absl::StrCat("was declared dead: ", base::OneLine(what));
  } else if (!what.empty()) {
    why = absl::StrCat("failed: ", base::OneLine(what));
  }
  gone_.emplace_back(state.member, why);
  if (gone_.size() > options_.max_gone) gone_.pop_front();
  std::string text = absl::StrCat(Describe(state.member), " ", why);
  const bool in_order = kind == MemberEvent::Kind::kLeft && what.empty();
  if (in_order && options_.world_size != kOpenWorld) left_.insert(state.member.rank);
  Announce(kind, state.member, in_order ? absl::OkStatus() : absl::UnavailableError(text), actions);
  AnswerPoll(state, NotAMember(id), actions);
  Append(gathers_.MemberGone(state.member, text), actions);
  JoinInPlaceOf(state.member, now, actions);
  TrimEvents(now, actions);
}

void MembershipCore::TrimEvents(absl::Time now, Actions& actions) {
  uint64_t seen = last_event_;
  for (const auto& [rank, state] : members_) seen = std::min(seen, state.seen);
  while (!events_.empty() && events_.front().number <= seen) events_.pop_front();
  if (events_.size() <= options_.max_events) return;
  for (const auto& [rank, state] : members_) {
    if (state.seen >= events_.front().number || IsCoordinator(state.member.id)) continue;
    // Removes, and comes back here until the rest fits.
    Remove(state.member.id, MemberEvent::Kind::kDead,
           absl::StrCat("it did not fetch the last ", events_.size(), " events"), now, actions);
    return;
  }
}

absl::Status MembershipCore::Heartbeat(const base::MemberId& id, absl::Time now) {
  Observe(now);
  State* state = Find(id);
  if (state == nullptr) return NotAMember(id);
  Renew(*state, now);
  return absl::OkStatus();
}

void MembershipCore::Heard(const base::MemberId& id, absl::Time when) {
  State* state = Find(id);
  if (state == nullptr || when <= state->heard) return;
  state->heard = when;
  state->lease_end = std::max(state->lease_end, when + options_.lease);  // InfiniteFuture stays.
}

std::vector<base::MemberId> MembershipCore::Late(absl::Time now) const {
  std::vector<base::MemberId> late;
  for (const auto& [rank, state] : members_) {
    if (state.lease_end <= now) late.push_back(state.member.id);
  }
  return late;
}

MembershipCore::Actions MembershipCore::Poll(const base::MemberId& id, uint64_t after, Token token,
                                             absl::Time now) {
  absl::Status status = Heartbeat(id, now);
  State* state = Find(id);
  if (status.ok() && (after > last_event_ || after < state->seen)) {
    status = absl::InvalidArgumentError(absl::StrCat(id.ToString(), " polls after event ", after,
                                                     ": it has seen ", state->seen, " of ", last_event_));
  }
  Actions actions;
  if (!status.ok()) {
    actions.push_back(PollAnswer{token, std::move(status), {}});
    return actions;
  }
  if (state->poll.has_value()) actions.push_back(PollAnswer{*state->poll, absl::OkStatus(), {}});
  state->seen = after;
  state->poll = token;
  state->poll_end = now + options_.poll_hold;
  if (after < last_event_) AnswerPoll(*state, absl::OkStatus(), actions);
  TrimEvents(now, actions);
  return actions;
}

MembershipCore::Actions MembershipCore::Leave(const base::MemberId& id, absl::Time now,
                                              const std::string& why) {
  Observe(now);
  Actions actions;
  Remove(id, MemberEvent::Kind::kLeft, why, now, actions);
  return actions;
}

MembershipCore::Actions MembershipCore::ReportDead(const base::MemberId& reporter,
                                                   const base::MemberId& suspect, Evidence evidence,
                                                   const std::string& what, absl::Time now) {
  Observe(now);
  Actions actions;
  State* from = Find(reporter);
  if (from == nullptr || Find(suspect) == nullptr || IsCoordinator(suspect) || reporter == suspect) {
    return actions;
  }
  Renew(*from, now);
  if (IsCoordinator(reporter) || evidence == Evidence::kSeen) {
    Remove(suspect, MemberEvent::Kind::kDead, absl::StrCat("seen by ", reporter.name, ": ", what), now,
           actions);
  } else {
    Ask(suspect, actions);
  }
  return actions;
}

MembershipCore::Actions MembershipCore::Gather(const base::MemberId& id, std::string name,
                                               std::vector<std::string> participants, std::string value,
                                               absl::Duration limit, Token token, absl::Time now) {
  absl::Status status = Heartbeat(id, now);
  Actions actions;
  if (!status.ok()) {
    actions.push_back(GatherAnswer{token, std::move(status), nullptr});
    return actions;
  }
  // A limit without end would keep it for ever.
  absl::Time deadline = now + std::min(std::max(limit, absl::ZeroDuration()), absl::Hours(24 * 365));
  Append(gathers_.Contribute(Find(id)->member, std::move(name), std::move(participants), std::move(value),
                             deadline, token),
         actions);
  return actions;
}

MembershipCore::Actions MembershipCore::Tick(absl::Time now) {
  Observe(now);
  Actions actions;
  EndJoins(now, actions);
  for (const base::MemberId& id : Late(now)) {
    Remove(id, MemberEvent::Kind::kDead,
           absl::StrCat("nothing was heard of it for ", absl::FormatDuration(options_.lease)), now, actions);
  }
  JudgeSilent(now, actions);
  for (auto& [rank, state] : members_) {
    if (state.poll.has_value() && state.poll_end <= now) AnswerPoll(state, absl::OkStatus(), actions);
  }
  Append(gathers_.Tick(now), actions);
  return actions;
}

absl::Time MembershipCore::NextTick() const {
  absl::Time next = std::min(observed_ + options_.lease / 4, gathers_.NextDeadline());
  for (const auto& [rank, state] : members_) {
    next = std::min(next, state.lease_end);
    if (state.poll.has_value()) next = std::min(next, state.poll_end);
  }
  for (const auto& [suspect, inquiry] : inquiries_) {
    for (const PendingJoin& join : inquiry.joins) next = std::min(next, join.deadline);
  }
  return next;
}

std::vector<Member> MembershipCore::Members() const {
  std::vector<Member> members;
  for (const auto& [rank, state] : members_) members.push_back(state.member);
  return members;
}

std::string MembershipCore::BrokenInvariant() const {
  std::set<std::string> names;
  uint64_t least = last_event_;
  for (const auto& [rank, state] : members_) {
    if (left_.count(rank) > 0) return "a rank has a member and has left";
    const Member& member = state.member;
    if (member.rank != rank) return "a member under another rank";
    const int ranks = options_.world_size == kOpenWorld ? kMostRanks : options_.world_size;
    if (rank.value() < 0 || rank.value() >= ranks) return "a rank out of range";
    if (!names.insert(member.id.name).second) return "two live members of one name";
    if (IsCoordinator(member.id) != (state.lease_end == absl::InfiniteFuture())) return "a wrong lease";
    if (state.seen > last_event_) return "a member has seen the future";
    if (state.poll.has_value() && state.seen < last_event_) return "a poll waits while there is news";
    least = std::min(least, state.seen);
    for (const auto& [gone, why] : gone_) {
      if (gone.id == member.id) return "a member is both live and gone";
    }
  }
  uint64_t number = last_event_ - events_.size();
  if (number < least && events_.size() > options_.max_events) return "too many events are kept";
  if (number > least) return "an event is lost that somebody has not seen";
  for (const MemberEvent& event : events_) {
    if (event.number != ++number) return "a gap in the events";
  }
  for (const auto& [suspect, inquiry] : inquiries_) {
    if (Live(suspect.name) == nullptr || Live(suspect.name)->id != suspect) return "a probe of nobody";
    if (!inquiry.asked && inquiry.joins.empty()) return "an inquiry that nobody made";
    for (const PendingJoin& join : inquiry.joins) {
      if (join.member.id.name != suspect.name && Live(join.member.rank)->id != suspect) {
        return "a join waits for somebody who is not in its way";
      }
    }
  }
  return gathers_.BrokenInvariant();
}

}  // namespace Atoll::cluster
