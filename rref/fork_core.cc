#include "atoll/rref/fork_core.h"

#include <algorithm>
#include <utility>

#include "atoll/base/log.h"
#include "atoll/base/status.h"

namespace Atoll::rref {

using base::ForkId;
using base::MemberId;
using base::ObjectId;

absl::Status ForkCore::Admit(const MemberId& holder) const {
  if (departed_.Contains(holder)) {
    return absl::UnavailableError(absl::StrCat(holder.ToString(), " is gone: its reference is refused"));
  }
  auto held = by_member_.find(holder);
  if (held != by_member_.end() && held->second.size() >= limits_.forks_per_member) {
    return absl::ResourceExhaustedError(
        absl::StrCat(holder.ToString(), " holds ", held->second.size(), " references, the most it may"));
  }
  return absl::OkStatus();
}

// The answer to a request with a fork that is known already.
absl::StatusOr<ForkCore::Begin> ForkCore::Repeated(const ForkId& fork, const MemberId& holder,
                                                   absl::string_view name) const {
  const Fork& known = forks_.at(fork);
  if (known.holder != holder) {
    return absl::PermissionDeniedError(absl::StrCat("reference ", fork.ToString(), " is held by ",
                                                    known.holder.ToString(), ", not by ", holder.ToString()));
  }
  if (known.state == ForkState::kReleased) {
    return absl::CancelledError(absl::StrCat("reference ", fork.ToString(), " was given up already"));
  }
  const Object& object = objects_.at(known.object);
  if (object.name != name || known.state == ForkState::kWaiting) {
    return absl::AlreadyExistsError(absl::StrCat("reference ", fork.ToString(), " is in use"));
  }
  return Begin{Begin::Kind::kHave, known.object};
}

void ForkCore::AddFork(const ForkId& fork, const MemberId& holder, ForkState state, ObjectId object) {
  forks_[fork] = Fork{holder, state, object};
  by_member_[holder].insert(fork);
  if (state != ForkState::kReleased) objects_.at(object).forks.insert(fork);
}

void ForkCore::EraseFork(const ForkId& fork) {
  auto it = forks_.find(fork);
  if (it == forks_.end()) return;
  auto member = by_member_.find(it->second.holder);
  member->second.erase(fork);
  if (member->second.empty()) by_member_.erase(member);
  auto object = objects_.find(it->second.object);
  if (object != objects_.end()) object->second.forks.erase(fork);
  forks_.erase(it);
}

bool ForkCore::DropIfFree(const ObjectId& id) {
  auto it = objects_.find(id);
  if (it == objects_.end() || !it->second.made || !it->second.name.empty() || !it->second.forks.empty()) {
    return false;
  }
  objects_.erase(it);
  return true;
}

absl::StatusOr<ForkCore::Begin> ForkCore::BeginCreate(const ForkId& fork, const MemberId& holder,
                                                      absl::string_view name) {
  if (auto known = forks_.find(fork); known != forks_.end()) {
    auto answer = Repeated(fork, holder, name);
    // An early release is answered once: nothing more of this fork will come, since rpc drops repeats.
    if (absl::IsCancelled(answer.status()) && known->second.object == ObjectId{}) EraseFork(fork);
    return answer;
  }
  ATOLL_RETURN_IF_ERROR(Admit(holder));
  if (!name.empty()) {
    if (auto found = names_.find(std::string(name)); found != names_.end()) {
      const bool made = objects_.at(found->second).made;
      AddFork(fork, holder, made ? ForkState::kHolding : ForkState::kWaiting, found->second);
      return Begin{made ? Begin::Kind::kHave : Begin::Kind::kWait, found->second};
    }
  }
  if (objects_.size() >= limits_.objects) {
    return absl::ResourceExhaustedError(absl::StrCat("no more than ", limits_.objects, " objects"));
  }
  const ObjectId id{self_, next_object_++};
  objects_[id].name = std::string(name);
  if (!name.empty()) names_[std::string(name)] = id;
  AddFork(fork, holder, ForkState::kWaiting, id);
  return Begin{Begin::Kind::kMake, id};
}

ForkCore::Finished ForkCore::FinishCreate(const ObjectId& id, bool made) {
  Finished finished;
  auto it = objects_.find(id);
  ATOLL_CHECK(it != objects_.end() && !it->second.made) << id.ToString();
  Object& object = it->second;
  const std::vector<ForkId> forks(object.forks.begin(), object.forks.end());
  std::vector<ForkId> released;
  for (const ForkId& fork : forks) {
    Fork& entry = forks_.at(fork);
    if (made && entry.state == ForkState::kWaiting) {
      entry.state = ForkState::kHolding;
      finished.holders.push_back(fork);
    } else {
      finished.abandoned.push_back(fork);
      released.push_back(fork);
    }
  }
  for (const ForkId& fork : released) EraseFork(fork);
  if (!made) {
    if (!object.name.empty()) names_.erase(object.name);
    objects_.erase(id);
    return finished;
  }
  object.made = true;
  finished.drop = DropIfFree(id);
  std::sort(finished.holders.begin(), finished.holders.end());
  return finished;
}

absl::StatusOr<ForkCore::Begin> ForkCore::Find(const ForkId& fork, const MemberId& holder,
                                               absl::string_view name) {
  if (forks_.contains(fork)) {
    auto known = forks_.find(fork);
    auto answer = Repeated(fork, holder, name);
    if (absl::IsCancelled(answer.status()) && known->second.object == ObjectId{}) EraseFork(fork);
    return answer;
  }
  ATOLL_RETURN_IF_ERROR(Admit(holder));
  auto found = names_.find(std::string(name));
  if (found == names_.end()) {
    return absl::NotFoundError(absl::StrCat("no object is pinned as '", name, "'"));
  }
  const bool made = objects_.at(found->second).made;
  AddFork(fork, holder, made ? ForkState::kHolding : ForkState::kWaiting, found->second);
  return Begin{made ? Begin::Kind::kHave : Begin::Kind::kWait, found->second};
}

absl::StatusOr<std::vector<ObjectId>> ForkCore::Release(const ForkId& fork, const MemberId& holder) {
  std::vector<ObjectId> dropped;
  auto it = forks_.find(fork);
  if (it == forks_.end()) {
    // Either a repeat (then the mark waits for nothing and goes with its member), or the creation is still on
    // its way. A departed member's events are over.
    if (Admit(holder).ok()) AddFork(fork, holder, ForkState::kReleased, ObjectId{});
    return dropped;
  }
  if (it->second.holder != holder) {
    return absl::PermissionDeniedError(absl::StrCat("reference ", fork.ToString(), " is held by ",
                                                    it->second.holder.ToString(), ", not by ",
                                                    holder.ToString()));
  }
  switch (it->second.state) {
    case ForkState::kReleased:
      break;
    case ForkState::kWaiting:
      it->second.state = ForkState::kReleased;  // FinishCreate reports and erases it.
      break;
    case ForkState::kHolding: {
      const ObjectId id = it->second.object;
      EraseFork(fork);
      if (DropIfFree(id)) dropped.push_back(id);
      break;
    }
  }
  return dropped;
}

std::vector<ObjectId> ForkCore::PeerGone(const MemberId& member) {
  std::vector<ObjectId> dropped;
  if (!departed_.Add(member, absl::OkStatus())) return dropped;
  auto held = by_member_.find(member);
  if (held == by_member_.end()) return dropped;
  const std::vector<ForkId> forks(held->second.begin(), held->second.end());
  for (const ForkId& fork : forks) {
    Fork& entry = forks_.at(fork);
    const bool making = entry.object != ObjectId{} && entry.state != ForkState::kHolding;
    if (making) {
      entry.state = ForkState::kReleased;  // FinishCreate reports and erases it.
      continue;
    }
    const ObjectId id = entry.object;
    EraseFork(fork);
    if (DropIfFree(id)) dropped.push_back(id);
  }
  std::sort(dropped.begin(), dropped.end());
  return dropped;
}

absl::StatusOr<std::vector<ObjectId>> ForkCore::Unpin(absl::string_view name) {
  std::vector<ObjectId> dropped;
  auto found = names_.find(std::string(name));
  if (found == names_.end() || !objects_.at(found->second).made) {
    return absl::NotFoundError(absl::StrCat("no object is pinned as '", name, "'"));
  }
  const ObjectId id = found->second;
  names_.erase(found);
  objects_.at(id).name.clear();
  if (DropIfFree(id)) dropped.push_back(id);
  return dropped;
}

bool ForkCore::Alive(const ObjectId& id) const {
  auto it = objects_.find(id);
  return it != objects_.end() && it->second.made;
}

std::vector<ForkCore::Entry> ForkCore::List() const {
  std::vector<Entry> entries;
  for (const auto& [id, object] : objects_) {
    if (!object.made) continue;
    Entry entry{id, object.name, {}};
    for (const ForkId& fork : object.forks) entry.holders.push_back(forks_.at(fork).holder);
    std::sort(entry.holders.begin(), entry.holders.end());
    entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  return entries;
}

void ForkCore::CheckInvariants() const {
  size_t attached = 0;
  for (const auto& [id, object] : objects_) {
    attached += object.forks.size();
    ATOLL_CHECK(!object.made || !object.forks.empty() || !object.name.empty())
        << id.ToString() << " is kept, but nothing holds it";
    for (const ForkId& fork : object.forks) {
      auto it = forks_.find(fork);
      ATOLL_CHECK(it != forks_.end() && it->second.object == id) << fork.ToString();
      ATOLL_CHECK((it->second.state == ForkState::kHolding) == object.made) << fork.ToString();
    }
  }
  size_t members = 0;
  for (const auto& [member, forks] : by_member_) {
    members += forks.size();
    for (const ForkId& fork : forks) ATOLL_CHECK(forks_.at(fork).holder == member) << fork.ToString();
  }
  ATOLL_CHECK(members == forks_.size()) << members;
  size_t unattached = 0;
  for (const auto& [id, fork] : forks_) unattached += fork.object == ObjectId{} ? 1 : 0;
  ATOLL_CHECK(attached + unattached == forks_.size()) << attached;
  for (const auto& [name, id] : names_) ATOLL_CHECK(objects_.at(id).name == name) << name;
}

}  // namespace Atoll::rref
