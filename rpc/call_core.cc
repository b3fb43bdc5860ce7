#include "atoll/rpc/call_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/base/text.h"

namespace Atoll::rpc {

uint64_t CallTable::Add(std::unique_ptr<PendingCall> call) {
  uint64_t id = next_++;
  call->id = id;
  one_way_ += call->one_way;
  if (call->deadline != absl::InfiniteFuture()) deadlines_.emplace(call->deadline, id);
  calls_.emplace_hint(calls_.end(), id, std::move(call));
  return id;
}

PendingCall* CallTable::Find(uint64_t id) {
  auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second.get();
}

std::unique_ptr<PendingCall> CallTable::Take(uint64_t id) {
  auto found = calls_.find(id);
  if (found == calls_.end()) return nullptr;
  std::unique_ptr<PendingCall> call = std::move(found->second);
  calls_.erase(found);
  deadlines_.erase({call->deadline, id});
  one_way_ -= call->one_way;
  return call;
}

CallTable::Expired CallTable::TakeExpired(absl::Time now) {
  Expired expired;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    uint64_t id = deadlines_.begin()->second;
    PendingCall* call = Find(id);
    if (call->landing) {
      call->expired = true;
      expired.landing = true;
      deadlines_.erase(deadlines_.begin());
    } else {
      expired.calls.push_back(Take(id));
    }
  }
  return expired;
}

std::vector<std::unique_ptr<PendingCall>> CallTable::TakeAll() {
  std::vector<std::unique_ptr<PendingCall>> all;
  for (auto it = calls_.begin(); it != calls_.end();) {
    if (it->second->landing) {
      it->second->expired = true;
      ++it;
    } else {
      one_way_ -= it->second->one_way;
      all.push_back(std::move(it->second));
      it = calls_.erase(it);
    }
  }
  deadlines_.clear();
  return all;
}

absl::Time CallTable::NextDeadline() const {
  return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
}

void CallTable::CheckInvariants() const {
  ATOLL_CHECK(calls_.empty() || calls_.rbegin()->first < next_);
  ATOLL_CHECK(deadlines_.size() <= calls_.size() && one_way_ <= calls_.size());
  for (const auto& [deadline, id] : deadlines_) {
    auto found = calls_.find(id);
    ATOLL_CHECK(found != calls_.end() && found->second->deadline == deadline) << "a deadline of nobody";
  }
}

absl::Status NoAnswerWithin(absl::Duration timeout) {
  return absl::DeadlineExceededError(absl::StrCat("no answer within ", base::DurationText(timeout)));
}

base::Ran RanUnanswered(const PendingCall& call) {
  OutMessagePtr request = call.request.lock();
  return request != nullptr && request->number == 0 ? base::Ran::kNo : base::Ran::kMaybe;
}

namespace {
constexpr size_t kMaxGivenUp = 1024;
}  // namespace

ServedTable::Admitted ServedTable::Admit(uint64_t call, uint64_t watermark) {
  Admitted admitted{Admission::kUnwanted, {}, {}};
  if (watermark > watermark_) {
    watermark_ = watermark;
    while (!calls_.empty() && calls_.begin()->first < watermark_) {
      admitted.given_up.push_back(std::move(calls_.begin()->second));
      calls_.erase(calls_.begin());
    }
    given_up_.erase(given_up_.begin(), given_up_.lower_bound(watermark_));
  }
  if (call < watermark_ || calls_.contains(call) || given_up_.erase(call) > 0) return admitted;
  if (calls_.size() >= limit_) {
    admitted.admission = Admission::kFull;
    return admitted;
  }
  admitted.admission = Admission::kRun;
  admitted.stop = calls_[call].get_token();
  return admitted;
}

bool ServedTable::Answer(uint64_t call) { return calls_.erase(call) > 0; }

std::vector<std::stop_source> ServedTable::Cancel(uint64_t call) {
  std::vector<std::stop_source> given_up;
  auto found = calls_.find(call);
  if (found != calls_.end()) {
    given_up.push_back(std::move(found->second));
    calls_.erase(found);
  } else if (call >= watermark_) {
    given_up_.insert(call);
    if (given_up_.size() > kMaxGivenUp) given_up_.erase(given_up_.begin());
  }
  return given_up;
}

std::vector<std::stop_source> ServedTable::CancelAll() {
  std::vector<std::stop_source> given_up;
  for (auto& [id, stop] : calls_) given_up.push_back(std::move(stop));
  calls_.clear();
  return given_up;
}

}  // namespace Atoll::rpc
