// Who is in the job, by name, incarnation, rank and address; who came and went; barriers and gathers.
// The coordinator serves it on its ordinary port; every member, the coordinator too, holds a Membership.
// Members renew a lease; the coordinator declares a member dead when the lease ends or when an agent saw it
// die, and tells everybody. Decisions are made in cluster/membership_core.h.
//
//   Membership (one a rank) ── calls "membership.*" ──> MembershipService on the coordinator ──>
//   MembershipCore
//        │ applies events: Agent::AddPeer, RemovePeer, then the observers
//        └ Agent::OnPeerDead ──> report
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "atoll/base/ids.h"
#include "atoll/cluster/member.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

using MemberInfo = cluster::Member;
using MembershipEvent = cluster::MemberEvent;
using cluster::kAnyRank;
using cluster::kOpenWorld;

struct MembershipOptions {
  base::Rank rank;  ///< In an open world also kAnyRank; not the coordinator's.
  std::string role;
  /// The same on all ranks: the coordinator refuses another. kOpenWorld: members come and go, as many as there are.
  int world_size = 1;
  absl::Duration lease = absl::Seconds(10);       ///< A member not heard of for so long is dead. The
                                                  ///< coordinator's counts, for all.
  absl::Duration join_limit = absl::Seconds(60);  ///< To reach the coordinator (it may start later than we).
};

/// Thread-safe. Destroyed before its Agent; the destructor leaves (without waiting for long). One an agent: a second
/// is AlreadyExists, but a Join that failed may be made again. In a child of fork it fails with FailedPrecondition,
/// and the destructor does nothing: the parent stays a member.
///
/// It ends with an error, which status() then tells, when this process was declared dead, or the
/// coordinator died or left, or was not heard of for two leases (also: when this process was stopped for
/// longer than its lease and wakes up). Whatever waits then fails with that error.
class Membership {
 public:
  /// On the coordinator: serves membership on `agent`, and is its first member.
  static absl::StatusOr<std::unique_ptr<Membership>> Serve(Agent* agent, MembershipOptions options);
  /// Elsewhere: joins at the coordinator's addresses. Every member that is there becomes known to `agent`
  /// (Agent::AddPeer), and every later one. A member that has our name or rank and does not answer (our old
  /// self, whose host died) is waited for: until its lease ends. Errors: AlreadyExists (a live member has our
  /// name: both named; or our rank is taken), InvalidArgument (rank not below the world size, another world size
  /// or one where the job is open), Unavailable or DeadlineExceeded (no coordinator), and what Endpoint::Connect
  /// says of a wrong key, job or version.
  static absl::StatusOr<std::unique_ptr<Membership>> Join(Agent* agent, std::vector<std::string> coordinator,
                                                          MembershipOptions options);
  virtual ~Membership() = default;

  virtual const MemberInfo& self() const = 0;
  /// OK while this is a member (and after Leave); else why not.
  virtual absl::Status status() const = 0;
  /// Live members, by rank.
  virtual std::vector<MemberInfo> Members() const = 0;
  /// The live member of that rank or name. NotFound names us and what is missing, and why its last holder is gone
  /// where that is known. Else as status().
  virtual absl::StatusOr<MemberInfo> Find(base::Rank rank) const = 0;
  virtual absl::StatusOr<MemberInfo> Find(absl::string_view name) const = 0;
  /// Agent::Call and Send to whoever has that rank when they are called; to our own too. Where nobody has it they
  /// fail as Find does (ran: no).
  virtual base::Future<Received> Call(base::Rank to, const MethodId& method, Payload request,
                                      CallOptions options = {}) = 0;
  virtual base::Future<base::Unit> Send(base::Rank to, const MethodId& method, Payload request) = 0;

  /// Waits until every rank below the world size is there, or has been and left in order: who is done early, or was
  /// before we came, is not missing. DeadlineExceeded lists the ranks that are. InvalidArgument in an open world,
  /// which has no "all".
  virtual absl::Status WaitForAll(absl::Duration limit) = 0;
  /// Waits until at least `count` members are there. DeadlineExceeded says how many are, and who.
  virtual absl::Status WaitForCount(int count, absl::Duration limit) = 0;
  /// Called on the agent's pool, in order, for every change from now on (ourselves excepted). When the
  /// coordinator is lost, the last event is its death.
  virtual void OnEvent(std::function<void(const MembershipEvent&)> observer) = 0;
  /// Called once, on the agent's pool, when status() becomes an error; at once if it is one.
  virtual void OnError(std::function<void(absl::Status)> observer) = 0;

  /// Gathers one value (at most 1 MiB) from `participants` members (names; empty: all ranks of the launch's
  /// world but those whose member is gone; in an open world, those who are there when the first of them comes: who
  /// that was is in no answer)
  /// under `name`, and returns them by rank; a barrier is a gather of nothing. Every use of a name is a new one: a
  /// member's n-th meets the others' n-th. DeadlineExceeded names who is missing; Unavailable, who died or left. It
  /// then fails for all its participants, also for those that come later.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(absl::string_view name, std::string value,
                                                             absl::Duration limit,
                                                             std::vector<std::string> participants = {}) = 0;
  absl::Status Barrier(absl::string_view name, absl::Duration limit);

  /// Leaves: others get one kLeft event, whose reason is OK if `why` is, and else says what `why` says: this
  /// process failed, and they need not wait for its lease to hear of it. The coordinator waits (up to `limit`)
  /// until the others left, and then leaves in any case.
  virtual absl::Status Leave(absl::Duration limit, const absl::Status& why = absl::OkStatus()) = 0;
};

}  // namespace Atoll::rpc
