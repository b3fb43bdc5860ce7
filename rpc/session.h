// One peer: carries out what SessionCore and the call tables decide. Internal to rpc.
//
// Held by shared_ptr, by the hub, by callbacks of its pipes, and by responders. Thread-safe: `mu_` guards the
// cores and is never held while a pipe, a handler or a callback of a user runs. Actions are carried out in
// order by whichever thread finds nobody else at it (Drain): messages go out in the order of their
// numbers, from the thread that posted them, without a hop; bursts of small ones in bundles, from the loop.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "atoll/rpc/call_core.h"
#include "atoll/rpc/device.h"
#include "atoll/rpc/hub.h"
#include "atoll/rpc/payload.h"
#include "atoll/rpc/session_core.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {

class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(std::shared_ptr<Hub> hub, Peer peer);

  /// As Agent::Call and Agent::Send.
  void Call(const MethodId& method, Payload request, CallOptions options, OnReply on_reply);
  void Send(const MethodId& method, Payload request, absl::AnyInvocable<void(absl::Status)> on_received);
  /// Answers call `id` of the peer. The loans of a reply that nobody waits for are returned.
  void Reply(uint64_t id, absl::StatusOr<Payload> reply);

  /// A pipe of this peer came in.
  void OnAccepted(std::shared_ptr<transport::Pipe> pipe);
  /// New addresses of the same incarnation; an incarnation that was not known (0) is filled in.
  void Update(const Peer& peer);
  /// Whether our side made it known (Agent::AddPeer), and it is not only one that came.
  void MarkAdded() { added_.store(true); }
  bool added() const { return added_.load(); }
  /// Connects if nothing else does, so that a dead peer is seen to be one.
  void Probe();
  Peer peer() const;
  bool dead() const;
  /// When its `incarnation` last said something; InfinitePast for another one.
  absl::Time LastHeard(base::Incarnation incarnation) const;

  /// Ends it: calls in flight fail with `reason` (not OK); one log line, of level info if `quiet`.
  /// `notify`: tell the observers.
  void Die(absl::Status reason, bool notify, bool quiet);
  /// Waits until everything posted has been received, or the peer cannot be reached. False at the end of
  /// `limit`.
  bool AwaitDrained(absl::Duration limit) const;
  /// Tells the peer that we go, in order. It then closes the pipes.
  void SayBye();
  bool AwaitClosed(absl::Duration limit) const;
  /// "worker1#3f2a: 2 messages not acknowledged, 1 not sent", or nothing.
  std::string Leftover() const;

 private:
  struct PipeState;
  struct Incoming;
  struct ClientCall;
  struct Backlog;
  class BacklogWait;
  using PipePtr = std::shared_ptr<PipeState>;
  using Lane = transport::Lane;

  // session.cc: pipes, and the end.
  void Connect(Lane lane, uint64_t attempt);
  void Finish(const absl::Status& reason);
  PipePtr AddPipe(std::shared_ptr<transport::Pipe> pipe) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PipeClosed(const PipePtr& pipe, const absl::Status& status);
  void OnTimer(absl::Time when);
  Destination DestinationOf(bool reply) const;
  absl::Status Explain(const absl::Status& status, const MethodId& method, base::Ran ran) const;
  bool Drained() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  std::string AddressText() const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  // session_send.cc: the core's actions, messages out.
  absl::Status Post(OutMessagePtr message, bool force = false);
  bool InBurst(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Flush(bool at_once) ABSL_LOCKS_EXCLUDED(mu_);
  void Drain() ABSL_LOCKS_EXCLUDED(mu_);
  void Execute(SessionCore::Action& action, const PipePtr& pipe);
  void Write(const PipePtr& pipe, transport::Message message);
  void WriteData(const PipePtr& pipe, SessionCore::Action& action);
  void WriteNumber(const PipePtr& pipe, uint64_t number, const Acks& acks, bool ack_now);
  static size_t CountSmall(absl::Span<const SessionCore::Action> actions, absl::Span<const PipePtr> pipes);
  void WriteBundle(const PipePtr& pipe, absl::Span<SessionCore::Action> actions);
  absl::Status CheckSendable(const Message& message, const PipePtr& pipe) const;
  void Reject(Message& message, const absl::Status& status);

  // session_calls.cc: calls out, requests in.
  void Start(std::unique_ptr<ClientCall> call, Payload request, CallOptions options);
  absl::Status AwaitRoom(const Payload& request, const CallOptions& options, size_t* reserved);
  void StopCall(uint64_t id);
  std::shared_ptr<transport::Pipe> BulkPipe() const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  void Fail(std::unique_ptr<ClientCall> call, const absl::Status& status, base::Ran ran);
  void FailLater(std::unique_ptr<PendingCall> call, const absl::Status& status, base::Ran ran);
  void Complete(std::unique_ptr<ClientCall> call, const Header& header, std::vector<at::Tensor> tensors,
                Streams streams);
  // Those that their deadline ends where `why` is OK.
  void End(std::vector<std::unique_ptr<PendingCall>> calls, const absl::Status& why);
  void RunRequest(const Header& header, std::vector<at::Tensor> tensors, Streams streams,
                  absl::Status refusal, std::shared_ptr<BacklogWait> wait = nullptr);
  void Refuse(uint64_t call, const absl::Status& status);
  Responder ResponderOf(uint64_t id, Streams streams);
  Responder Unheard() const;
  absl::StatusOr<std::shared_ptr<BacklogWait>> JoinBacklog(const Method& method, const Header& header) const;

  // session_receive.cc: messages in.
  void StartRead(const PipePtr& pipe);
  void OnDescriptor(const PipePtr& pipe, absl::StatusOr<transport::Descriptor> descriptor);
  void OnHello(const PipePtr& pipe, const Header& header);
  void OnBye();
  void Violation(const PipePtr& pipe, const absl::Status& status);
  void TooEarly(const PipePtr& pipe, uint64_t number);
  bool OnPlainData(const PipePtr& pipe, const Header& header, size_t bytes);
  bool OnBundle(const PipePtr& pipe, const Header& bundle);
  void OnTensorData(std::shared_ptr<Incoming> in);
  bool IsLanding(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PrepareLanding(Incoming& in);
  void GiveUp(uint64_t id, const absl::Status& status);
  void OnLanded(const std::shared_ptr<Incoming>& in, const absl::Status& status);

  const std::shared_ptr<Hub> hub_;
  std::atomic<bool> added_{false};

  mutable absl::Mutex mu_;
  Peer peer_ ABSL_GUARDED_BY(mu_);
  std::string address_ ABSL_GUARDED_BY(mu_);  // Of the last pipe.
  SessionCore core_ ABSL_GUARDED_BY(mu_);
  CallTable calls_ ABSL_GUARDED_BY(mu_);
  ServedTable served_ ABSL_GUARDED_BY(mu_);
  size_t reserved_calls_ ABSL_GUARDED_BY(mu_) = 0;  // By AwaitRoom, of calls that are being prepared.
  size_t reserved_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<uint64_t, PipePtr> pipes_ ABSL_GUARDED_BY(mu_);
  uint64_t next_pipe_ ABSL_GUARDED_BY(mu_) = 1;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool deferred_ ABSL_GUARDED_BY(mu_) = false;                     // The loop will.
  absl::Time posted_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();  // The last message, of a burst of so many.
  int burst_ ABSL_GUARDED_BY(mu_) = 0;
  std::set<absl::Time> timers_ ABSL_GUARDED_BY(mu_);           // Under way; a new one is earlier than all.
  transport::MessageLimits peer_limits_ ABSL_GUARDED_BY(mu_);  // Of its hello: before any data is written.
  const std::shared_ptr<Backlog> backlog_;
  absl::Time heard_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int violations_ ABSL_GUARDED_BY(mu_) = 0;  // Since,
  absl::Time violations_since_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  bool notify_ ABSL_GUARDED_BY(mu_) = true;  // Of the death.
  bool quiet_ ABSL_GUARDED_BY(mu_) = false;
  DeviceMap reply_map_ ABSL_GUARDED_BY(mu_);  // Ours to theirs; of its hello.
  // A request's tensors that have begun to arrive on each lane: kept over a cut, and guarded against a second
  // writer while a pipe that was replaced still writes.
  struct Landing {
    uint64_t number = 0;
    bool busy = false;
    bool request = false;
    std::vector<at::Tensor> tensors;
    Streams streams;
    absl::Status refusal;
    std::shared_ptr<BacklogWait> wait;
    std::shared_ptr<Incoming> waiting;
  };
  std::array<Landing, 2> landings_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::rpc
