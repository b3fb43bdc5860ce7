// The coordinator's side of membership: gives calls to the core, and carries out what it decides. Internal to
// rpc; see membership.h.
//
// Held by shared_ptr, by the Membership that serves and by the agent's table of methods. Thread-safe: `mu_`
// guards the core and is never held while the agent or a responder is called.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/executor.h"
#include "atoll/cluster/membership_core.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

class MembershipService : public std::enable_shared_from_this<MembershipService> {
 public:
  /// Registers its methods. AlreadyExists if the agent serves membership already.
  static absl::StatusOr<std::shared_ptr<MembershipService>> Start(Agent* agent,
                                                                  cluster::MembershipCore::Options options,
                                                                  cluster::Member self);

  /// The coordinator's agent saw that `id` died.
  void ReportDead(const base::MemberId& id, const std::string& what);
  /// Calls that wait are answered with `reason`, and so is every later one. The agent is not used again.
  void Close(absl::Status reason);

 private:
  using Core = cluster::MembershipCore;
  /// What a call asks of the core. May be answered by a later action with the token.
  using Ask = std::function<Core::Actions(Core& core, Core::Token token, absl::Time now)>;

  MembershipService(Agent* agent, Core::Options options, cluster::Member self);

  absl::Status Register();
  absl::Status Serve(const char* method, std::function<void(ServerCall)> handler);
  void OnJoin(ServerCall call);
  void OnHeartbeat(ServerCall call);
  void OnPoll(ServerCall call);
  void OnReport(ServerCall call);
  void OnGather(ServerCall call);
  void OnLeave(ServerCall call);

  /// Puts `ask` to the core; the answer goes to `responder`. Of a join: `cancelled` tells whether its caller
  /// waits no more.
  void Put(Responder responder, const Ask& ask, std::function<bool()> cancelled = nullptr);
  /// The same for what has no answer.
  void Tell(const Ask& ask);
  /// What the core says to `ask`, once it has forgotten the joins that nobody waits for any more.
  Core::Actions Decide(const Ask& ask, Core::Token token) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run(Core::Actions actions);
  void Do(Core::JoinAnswer answer);
  void Do(Core::PollAnswer answer);
  void Do(const Core::GatherAnswer& answer);
  void Do(const Core::Probe& probe);
  void Answer(Core::Token token, absl::StatusOr<Payload> reply);
  void Arm();
  void OnTimer();

  Agent* const agent_;
  const Core::Options options_;
  base::InlineExecutor inline_;  // Handlers are short: they need not wait for the pool, nor behind its tasks.

  absl::Mutex mu_;
  Core core_ ABSL_GUARDED_BY(mu_);
  absl::Status closed_ ABSL_GUARDED_BY(mu_);
  Core::Token next_token_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<Core::Token, Responder> waiting_ ABSL_GUARDED_BY(mu_);
  std::map<Core::Token, std::function<bool()>> joins_ ABSL_GUARDED_BY(mu_);  // Of those that wait.
  absl::Time armed_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  base::Timer::Id timer_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace Atoll::rpc
