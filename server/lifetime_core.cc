#include "atoll/server/lifetime_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace Atoll::server {

bool LifetimeCore::OnJoined(absl::string_view name, bool is_worker) {
  const bool is_new = here_.emplace(std::string(name), is_worker).second;
  if (is_new && is_worker) ++workers_;
  if (here_.size() >= static_cast<size_t>(others_)) begun_ = true;
  return is_new;
}

void LifetimeCore::Forget(absl::string_view name) {
  const auto found = here_.find(name);
  if (found == here_.end()) return;
  if (found->second) --workers_;
  here_.erase(found);
}

void LifetimeCore::OnLeft(absl::string_view name) {
  const auto found = here_.find(name);
  if (begun_ && found != here_.end() && found->second) ++left_in_order_;
  Forget(name);
}

void LifetimeCore::OnDead(absl::string_view name, absl::string_view reason, absl::Time now) {
  const auto found = here_.find(name);
  if (found == here_.end()) return;
  if (!begun_) return Forget(name);
  deaths_.push_back(absl::StrCat(name, " died: ", reason));
  if (!found->second) {
    owner_died_ = true;
    give_up_ = std::min(give_up_, now + patience_);
  }
  Forget(name);
}

void LifetimeCore::OnExpelled(absl::string_view reason) {
  expelled_ = true;
  deaths_.push_back(absl::StrCat("we are no member any more: ", reason));
}

void LifetimeCore::OnUnled(absl::string_view reason, absl::Time now) {
  if (!owner_died_) deaths_.push_back(absl::StrCat("the job has no coordinator any more: ", reason));
  owner_died_ = true;
  give_up_ = std::min(give_up_, now + patience_);
}

void LifetimeCore::OnStop(absl::Time now) {
  stopping_ = true;
  give_up_ = std::min(give_up_, now + patience_);
}

LifetimeCore::Verdict LifetimeCore::At(absl::Time now) const {
  if (expelled_) return Verdict::kFailed;
  if (!begun_ && now < give_up_) return Verdict::kServe;
  if (workers_ > 0 && now < give_up_) return Verdict::kServe;
  if (owner_died_) return Verdict::kFailed;
  if (stopping_) return Verdict::kStopped;
  return left_in_order_ > 0 ? Verdict::kDone : Verdict::kFailed;
}

std::string LifetimeCore::WhatFailed() const {
  return deaths_.empty() ? "no worker ever came" : absl::StrJoin(deaths_, "; ");
}

}  // namespace Atoll::server
