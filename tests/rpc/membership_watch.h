// What a member is told of who comes and goes. For tests.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "atoll/rpc/membership.h"

namespace Atoll::rpc {

/// Collects events, and waits at most `hang` for one.
class MembershipWatch {
 public:
  using Kind = MembershipEvent::Kind;
  MembershipWatch(Membership& membership, absl::Duration hang) : hang_(hang) {
    membership.OnEvent([state = state_](const MembershipEvent& event) {
      absl::MutexLock lock(&state->mu);
      state->events.push_back(event);
    });
  }
  /// The first event of `kind` about `name`; fails the test if none comes.
  MembershipEvent Await(Kind kind, const std::string& name) {
    MembershipEvent found;
    auto there = [&] {
      for (const MembershipEvent& event : state_->events) {
        if (event.kind != kind || event.member.id.name != name) continue;
        found = event;
        return true;
      }
      return false;
    };
    absl::MutexLock lock(&state_->mu);
    EXPECT_TRUE(state_->mu.AwaitWithTimeout(absl::Condition(&there), hang_)) << name;
    return found;
  }
  std::vector<std::string> About(const std::string& name) const {
    static constexpr const char* kWords[] = {"joined", "left", "dead"};
    std::vector<std::string> words;
    absl::MutexLock lock(&state_->mu);
    for (const MembershipEvent& event : state_->events) {
      if (event.member.id.name == name) words.push_back(kWords[static_cast<int>(event.kind)]);
    }
    return words;
  }

 private:
  struct State {
    absl::Mutex mu;
    std::vector<MembershipEvent> events;
  };
  const absl::Duration hang_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace Atoll::rpc
