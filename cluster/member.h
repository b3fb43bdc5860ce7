// A member of a job, and what can happen to one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "atoll/base/ids.h"

namespace Atoll::cluster {

struct Member {
  base::MemberId id;
  base::Rank rank;
  std::string role;  ///< "owner" or "worker".
  std::vector<std::string> addresses;
};

/// Of a member that asks to be given one: the coordinator takes the lowest that is free.
inline constexpr base::Rank kAnyRank{-1};
/// The world size of a job that has none: members come and go, as many as there are.
inline constexpr int kOpenWorld = 0;

/// "worker1#3f2a (rank 3)": for errors.
std::string Describe(const Member& member);

struct MemberEvent {
  enum class Kind : uint8_t { kJoined = 0, kLeft = 1, kDead = 2 };
  Kind kind = Kind::kJoined;
  Member member;
  absl::Status reason;  ///< Of a death: what was seen; of one that left since it failed: why. Else OK.
  uint64_t number = 0;  ///< 1, 2, 3 ... in the job.
};

}  // namespace Atoll::cluster
