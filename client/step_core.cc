#include "atoll/client/step_core.h"

#include <algorithm>

#include "absl/container/btree_set.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"

namespace Atoll::client {

StepCore::StepCore(const shard_optim::Layout* layout)
    : layout_(layout), states_(layout->chunks().size(), State::kUnsent), steps_(layout->chunks().size(), 0) {}

void StepCore::Begin() {
  ATOLL_CHECK(idle()) << outstanding() << " chunks are outstanding";
  std::fill(states_.begin(), states_.end(), State::kUnsent);
  begun_ = true;
  sent_ = landed_ = failed_ = contributors_ = 0;
  first_error_ = absl::OkStatus();
}

void StepCore::Sent(int chunk) {
  ATOLL_CHECK(begun_ && states_[chunk] == State::kUnsent) << "chunk " << chunk;
  states_[chunk] = State::kSent;
  ++sent_;
}

bool StepCore::Landed(int chunk, int contributors, int64_t step) {
  if (states_[chunk] != State::kSent) return false;
  states_[chunk] = State::kLanded;
  steps_[chunk] = step;
  contributors_ = landed_ == 0 ? contributors : std::min(contributors_, contributors);
  ++landed_;
  return true;
}

bool StepCore::Failed(int chunk, const absl::Status& status) {
  if (states_[chunk] != State::kSent) return false;
  states_[chunk] = absl::IsDataLoss(status) ? State::kBroken : State::kFailed;
  ++failed_;
  if (first_error_.ok()) first_error_ = status;
  return true;
}

std::vector<StepCore::Count> StepCore::CountByParameter() const {
  std::vector<Count> counts(layout_->parameters().size());
  for (size_t i = 0; i < states_.size(); ++i) {
    for (const shard_optim::Segment& segment : layout_->chunks()[i].segments) {
      Count& count = counts[segment.parameter];
      if (count.chunks == 0) count.first_step = steps_[i];
      count.mixed |= steps_[i] != count.first_step;
      ++count.chunks;
      count.landed += states_[i] == State::kLanded ? 1 : 0;
      count.sent |= states_[i] == State::kSent;
      count.broken |= states_[i] == State::kBroken;
    }
  }
  return counts;
}

absl::btree_set<int> StepCore::torn() const {
  absl::btree_set<int> torn = torn_;
  if (!begun_) return torn;
  const std::vector<Count> counts = CountByParameter();
  for (size_t i = 0; i < counts.size(); ++i) {
    const Count& count = counts[i];
    const bool half = count.landed > 0 && count.landed < count.chunks;
    if (half || count.sent || count.broken || count.mixed) torn.insert(static_cast<int>(i));
  }
  return torn;
}

absl::Status StepCore::End() {
  ATOLL_CHECK(over()) << outstanding() << " chunks are outstanding";
  begun_ = false;
  const std::vector<Count> counts = CountByParameter();
  for (size_t i = 0; i < counts.size(); ++i) {
    const Count& count = counts[i];
    if (count.landed == count.chunks && !count.mixed) {
      torn_.erase(static_cast<int>(i));
    } else if (count.landed > 0 || count.broken) {
      torn_.insert(static_cast<int>(i));
    }
  }
  if (failed_ == 0) return absl::OkStatus();
  return base::Annotate(first_error_, absl::StrCat(failed_, " of ", states_.size(), " chunks failed"));
}

std::vector<int> StepCore::MissingOwners() const {
  absl::btree_set<int> owners;
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i] == State::kUnsent || states_[i] == State::kSent) owners.insert(layout_->chunks()[i].owner);
  }
  return {owners.begin(), owners.end()};
}

}  // namespace Atoll::client
