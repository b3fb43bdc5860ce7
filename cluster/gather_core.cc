#include "atoll/cluster/gather_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace Atoll::cluster {
namespace {

absl::Status Named(absl::StatusCode code, const std::string& name, absl::string_view text) {
  return absl::Status(code, absl::StrCat("gather '", name, "': ", text));
}

}  // namespace

std::string Describe(const Member& member) {
  if (member.rank == kAnyRank) return absl::StrCat(member.id.ToString(), " (any rank)");
  return absl::StrCat(member.id.ToString(), " (rank ", member.rank.value(), ")");
}

bool GatherCore::Sits(const Key& key, const Seat& seat, const Member& member) {
  return key.second.empty() ? seat.rank == member.rank : seat.name == member.id.name;
}

absl::Status GatherCore::Create(const Key& key, const Member& from, Gather& gather) const {
  const auto& [name, participants] = key;
  if (participants.empty()) {
    std::vector<base::Rank> ranks = roster_->LiveRanks();
    if (roster_->world_size() != kOpenWorld) {
      ranks.clear();
      for (int rank = 0; rank < roster_->world_size(); ++rank) {
        if (!roster_->WhyGone(base::Rank(rank)).has_value()) ranks.emplace_back(rank);
      }
    }
    for (base::Rank rank : ranks) {
      Seat seat;
      seat.rank = rank;
      gather.seats.push_back(std::move(seat));
    }
    return absl::OkStatus();
  }
  if (!std::binary_search(participants.begin(), participants.end(), from.id.name)) {
    return Named(absl::StatusCode::kInvalidArgument, name,
                 absl::StrCat(from.id.name, " calls it, but is not among its participants (",
                              absl::StrJoin(participants, ", "), ")"));
  }
  for (const std::string& participant : participants) {
    Seat seat;
    seat.name = participant;
    gather.seats.push_back(std::move(seat));
  }
  return absl::OkStatus();
}

std::string GatherCore::WhoIsGone(const Key& key) const {
  for (const std::string& participant : key.second) {
    if (auto why = roster_->WhyGone(participant)) return *why;
  }
  return "";
}

bool GatherCore::ForgetOldestFailure() {
  Generations* home = nullptr;
  Generations::iterator oldest;
  for (auto& [key, generations] : gathers_) {
    for (auto gather = generations.begin(); gather != generations.end(); ++gather) {
      if (gather->failure.ok() || (home != nullptr && gather->order > oldest->order)) continue;
      home = &generations;
      oldest = gather;
    }
  }
  if (home == nullptr) return false;
  home->erase(oldest);
  --size_;
  return true;
}

GatherCore::Answers GatherCore::Contribute(const Member& from, std::string name,
                                           std::vector<std::string> participants, std::string value,
                                           absl::Time deadline, Token token) {
  const size_t count = participants.size();
  const bool open = roster_->world_size() == kOpenWorld;
  if (open && count > limits_.participants) participants.clear();
  std::sort(participants.begin(), participants.end());
  participants.erase(std::unique(participants.begin(), participants.end()), participants.end());
  auto refuse = [&](absl::StatusCode code, absl::string_view text) {
    return Answers{{token, Named(code, name, text), nullptr}};
  };
  if (name.empty() || name.size() > limits_.name_bytes) {
    name = name.substr(0, 32);
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat("its name should have 1 to ", limits_.name_bytes, " bytes"));
  }
  if (value.size() > limits_.value_bytes) {
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat("a value of ", value.size(), " bytes: the limit is ", limits_.value_bytes));
  }
  if (open && count > limits_.participants) {
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat(count, " participants: the limit is ", limits_.participants));
  }
  if (!open && participants.size() > static_cast<size_t>(roster_->world_size())) {
    return refuse(absl::StatusCode::kInvalidArgument,
                  absl::StrCat(participants.size(), " participants in a world of ", roster_->world_size()));
  }
  Key key{std::move(name), std::move(participants)};
  Generations& generations = gathers_[key];
  auto waits_for_us = [&](const Gather& gather, size_t* at) {
    for (*at = 0; *at < gather.seats.size(); ++*at) {
      if (Sits(key, gather.seats[*at], from) && !gather.seats[*at].arrived) return true;
    }
    return false;
  };
  size_t at = 0;
  auto gather = std::find_if(generations.begin(), generations.end(),
                             [&](const Gather& one) { return waits_for_us(one, &at); });
  if (gather == generations.end()) {
    Gather fresh;
    absl::Status status = size_ >= limits_.gathers && !ForgetOldestFailure()
                              ? Named(absl::StatusCode::kResourceExhausted, key.first,
                                      absl::StrCat(size_, " gathers are open: that is the limit"))
                              : Create(key, from, fresh);
    if (!status.ok()) {
      Prune();
      return {{token, std::move(status), nullptr}};
    }
    fresh.order = ++begun_;
    gather = generations.insert(generations.end(), std::move(fresh));
    ++size_;
    // Who is gone cannot come: the others' call that meets this one is told the same.
    const std::string gone = WhoIsGone(key);
    if (!gone.empty()) Fail(*gather, Named(absl::StatusCode::kUnavailable, key.first, gone));
    waits_for_us(*gather, &at);
  }
  Seat& seat = gather->seats[at];
  seat.arrived = true;
  seat.rank = from.rank;
  seat.name = from.id.name;
  Answers answers;
  if (!gather->failure.ok()) {
    answers.push_back({token, gather->failure, nullptr});
  } else {
    seat.token = token;
    seat.value = std::move(value);
    gather->deadline = std::min(gather->deadline, deadline);
    answers = Complete(*gather);
  }
  Prune();
  return answers;
}

GatherCore::Answers GatherCore::Complete(Gather& gather) const {
  auto arrived = [](const Seat& seat) { return seat.arrived; };
  if (!std::all_of(gather.seats.begin(), gather.seats.end(), arrived)) return {};
  std::sort(gather.seats.begin(), gather.seats.end(),
            [](const Seat& a, const Seat& b) { return a.rank < b.rank; });
  auto values = std::make_shared<std::vector<std::string>>();
  Answers answers;
  for (Seat& seat : gather.seats) values->push_back(std::move(seat.value));
  for (const Seat& seat : gather.seats) answers.push_back({seat.token, absl::OkStatus(), values});
  return answers;
}

GatherCore::Answers GatherCore::Fail(Gather& gather, absl::Status failure) {
  Answers answers;
  for (const Seat& seat : gather.seats) {
    if (seat.arrived) answers.push_back({seat.token, failure, nullptr});
  }
  gather.failure = std::move(failure);
  gather.deadline = absl::InfiniteFuture();
  // Only who is there and has not come will fetch it. Who joins later starts with the next generation.
  std::vector<Seat> left;
  for (Seat& seat : gather.seats) {
    const Member* live = seat.name.empty() ? roster_->Live(seat.rank) : roster_->Live(seat.name);
    if (!seat.arrived && live != nullptr) left.push_back(std::move(seat));
  }
  gather.seats = std::move(left);
  return answers;
}

GatherCore::Answers GatherCore::MemberGone(const Member& member, const std::string& why) {
  Answers answers;
  for (auto& [name, generations] : gathers_) {
    const auto& key = name;  // clang 14 captures no structured binding.
    for (Gather& gather : generations) {
      auto seat = std::find_if(gather.seats.begin(), gather.seats.end(),
                               [&](const Seat& one) { return !one.arrived && Sits(key, one, member); });
      if (seat == gather.seats.end()) continue;
      gather.seats.erase(seat);
      if (!gather.failure.ok()) continue;
      Answers some = Fail(gather, Named(absl::StatusCode::kUnavailable, key.first, why));
      answers.insert(answers.end(), some.begin(), some.end());
    }
  }
  Prune();
  return answers;
}

GatherCore::Answers GatherCore::Tick(absl::Time now) {
  Answers answers;
  for (auto& [key, generations] : gathers_) {
    for (Gather& gather : generations) {
      if (gather.deadline > now) continue;
      Answers some = Fail(gather, Named(absl::StatusCode::kDeadlineExceeded, key.first,
                                        absl::StrCat("missing at its deadline: ", Missing(gather))));
      answers.insert(answers.end(), some.begin(), some.end());
    }
  }
  if (!answers.empty()) Prune();
  return answers;
}

std::string GatherCore::Missing(const Gather& gather) const {
  std::vector<std::string> missing;
  for (const Seat& seat : gather.seats) {
    if (seat.arrived) continue;
    const Member* live = seat.name.empty() ? roster_->Live(seat.rank) : roster_->Live(seat.name);
    if (live != nullptr) {
      missing.push_back(Describe(*live));
    } else if (seat.name.empty()) {
      missing.push_back(absl::StrCat("rank ", seat.rank.value(), " (never joined)"));
    } else {
      missing.push_back(absl::StrCat(seat.name, " (never joined)"));
    }
  }
  return absl::StrJoin(missing, ", ");
}

void GatherCore::Prune() {
  for (auto entry = gathers_.begin(); entry != gathers_.end();) {
    Generations& generations = entry->second;
    auto over = [](const Gather& gather) {
      return std::all_of(gather.seats.begin(), gather.seats.end(), [](const Seat& s) { return s.arrived; });
    };
    generations.remove_if(over);
    auto failed = [](const Gather& gather) { return !gather.failure.ok(); };
    size_t failures = std::count_if(generations.begin(), generations.end(), failed);
    for (auto gather = generations.begin(); failures > limits_.failed_of_one_name;) {
      bool drop = failed(*gather);
      gather = drop ? generations.erase(gather) : std::next(gather);
      failures -= drop;
    }
    entry = generations.empty() ? gathers_.erase(entry) : std::next(entry);
  }
  size_ = 0;
  for (const auto& [key, generations] : gathers_) size_ += generations.size();
}

absl::Time GatherCore::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, generations] : gathers_) {
    for (const Gather& gather : generations) next = std::min(next, gather.deadline);
  }
  return next;
}

std::string GatherCore::BrokenInvariant() const {
  size_t count = 0;
  for (const auto& [key, generations] : gathers_) {
    if (generations.empty()) return "a name without a generation is kept";
    for (const Gather& gather : generations) {
      ++count;
      size_t arrived = 0;
      for (const Seat& seat : gather.seats) arrived += seat.arrived;
      if (arrived == gather.seats.size()) return "a gather that is over is kept";
      if (gather.failure.ok() && arrived == 0) return "an open gather to which nobody came";
      if (gather.failure.ok() && gather.deadline == absl::InfiniteFuture()) return "a gather without end";
      for (const Seat& seat : gather.seats) {
        if (!gather.failure.ok() && !seat.arrived &&
            (seat.name.empty() ? roster_->Live(seat.rank) : roster_->Live(seat.name)) == nullptr) {
          return "a failure is kept for somebody who is gone";
        }
      }
    }
  }
  return count == size_ ? "" : "the count of gathers is wrong";
}

}  // namespace Atoll::cluster
