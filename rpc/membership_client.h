// A member's side of membership. Internal to rpc; see membership.h.
//
// Held by shared_ptr, by its Membership and by callbacks of the agent, which outlives the Membership. Thread-
// safe: `mu_` is never held while the agent, a promise or an observer is called.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/executor.h"
#include "atoll/base/future.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/membership.h"
#include "atoll/rpc/membership_messages.h"
#include "atoll/rpc/membership_service.h"

namespace Atoll::rpc {

class MembershipClient : public std::enable_shared_from_this<MembershipClient> {
 public:
  using Values = std::vector<std::string>;

  /// `service` is there on the coordinator only.
  MembershipClient(Agent* agent, MembershipOptions options, base::MemberId coordinator,
                   std::shared_ptr<MembershipService> service);

  /// Serves "membership.ping" on `agent`: before it joins.
  static absl::Status ServePing(Agent* agent);
  /// Takes over what the coordinator answered, and starts: heartbeats, events, reports.
  absl::Status Start(JoinReply reply);

  const MemberInfo& self() const { return self_; }
  bool is_coordinator() const { return service_ != nullptr; }
  absl::Status status() const;
  std::vector<MemberInfo> Members() const;
  absl::StatusOr<MemberInfo> Find(base::Rank rank) const;
  absl::StatusOr<MemberInfo> Find(absl::string_view name) const;
  absl::Status WaitForAll(absl::Duration limit);
  absl::Status WaitForCount(int count, absl::Duration limit);
  void OnEvent(std::function<void(const MembershipEvent&)> observer);
  void OnError(std::function<void(absl::Status)> observer);
  absl::StatusOr<Values> AllGather(absl::string_view name, std::string value, absl::Duration limit,
                                   std::vector<std::string> participants);
  absl::Status Leave(absl::Duration limit, const absl::Status& why);
  /// Ends everything without leaving.
  void Stop();

 private:
  /// The live member that fits, or NotFound about `what` with `otherwise`, unless the last that fitted is gone.
  absl::StatusOr<MemberInfo> FindIf(const std::function<bool(const MemberInfo&)>& fits,
                                    absl::string_view what, absl::string_view otherwise) const;
  /// OK when so many members are there (`or_left`: or have left in order). A DeadlineExceeded is the caller's to
  /// explain.
  absl::Status Await(size_t count, bool or_left, absl::Duration limit);
  /// Why nothing can be asked any more; OK until then.
  absl::Status NotRunning() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  bool running() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return error_.ok() && !left_; }
  /// Null when it is over: the agent may be gone.
  Agent* agent() const;
  /// We asked to leave: that we are no member is then no news.
  bool leaving() const;
  void Poll();
  void OnEvents(absl::StatusOr<Received> reply);
  bool Apply(const MembershipEvent& event);
  void RemovePeer(Agent* agent, const MembershipEvent& event);
  void Beat();
  void OnBeat(absl::Time sent, const absl::Status& status);
  void OnPeerDead(const base::MemberId& id, const absl::Status& reason);
  /// This process is no member any more: waiters and observers are told.
  void Fail(absl::Status error);
  absl::Status AwaitOthersGone(absl::Duration limit);
  void Announce(MembershipEvent event);

  Agent* const agent_;
  const MembershipOptions options_;
  const base::MemberId coordinator_;
  const std::shared_ptr<MembershipService> service_;
  const std::shared_ptr<base::SerialExecutor> observers_run_;
  MemberInfo self_;       // Its rank, if any would do, by Start.
  absl::Duration lease_;  // Set by Start.

  mutable absl::Mutex mu_;
  std::map<base::Rank, MemberInfo> members_ ABSL_GUARDED_BY(mu_);
  std::set<base::Rank> came_and_left_ ABSL_GUARDED_BY(mu_);  // In order, and nobody has the rank since.
  std::deque<std::pair<MemberInfo, std::string>> gone_ ABSL_GUARDED_BY(mu_);  // With why, the latest last.
  uint64_t seen_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  bool leaving_ ABSL_GUARDED_BY(mu_) = false;
  bool left_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::function<void(const MembershipEvent&)>> event_observers_ ABSL_GUARDED_BY(mu_);
  std::vector<std::function<void(absl::Status)>> error_observers_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, base::Promise<Values>> gathers_ ABSL_GUARDED_BY(mu_);
  uint64_t next_gather_ ABSL_GUARDED_BY(mu_) = 1;
  absl::Time confirmed_ ABSL_GUARDED_BY(mu_);  // When the last heartbeat that was answered was sent.
  absl::Time last_beat_ ABSL_GUARDED_BY(mu_);  // When this last ran; a gap: the process was stopped.
  absl::Time woken_ ABSL_GUARDED_BY(mu_);      // After the last such gap.
};

}  // namespace Atoll::rpc
