// Calls between the members of a job. One Agent is one rank: several may live in a process.
//
//   caller                                     callee
//   Call() ─ session (numbered, acknowledged,  ─> method's Allocate (where tensors land)
//            re-sent after a reconnect)        ─> handler on its executor ─> Responder::Reply
//   on_reply <──────────────────────────────────
//
// Sessions outlive connections: a cut connection starts a reconnect, and only a member's death (its
// lease, its process seen to end, or a new incarnation at its address) fails its calls.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "atoll/base/executor.h"
#include "atoll/base/future.h"
#include "atoll/base/ids.h"
#include "atoll/base/status.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::rpc {

/// A method and the version of its request and reply layout. Unknown ones are refused by name.
struct MethodId {
  std::string name;  ///< "shard.push_gradient"; at most 128 bytes of [a-z0-9_.].
  uint32_t version = 1;
  friend bool operator==(const MethodId&, const MethodId&) = default;
  template <class H>
  friend H AbslHashValue(H state, const MethodId& id) {
    return H::combine(std::move(state), id.name, id.version);
  }
};

/// A tensor on its way out. Only the bytes of the view itself travel (made contiguous if it is not).
/// A lent one is read without a copy, so nobody may write it until `on_return` has run (exactly once:
/// acknowledged by the peer, or the call failed; on a pool thread, it must not wait); a copied one is
/// free when the call that takes it returns.
/// One on a GPU is taken in the order of the calling thread's current streams, a copied one is free in that
/// order, and a loan ends in that order: on_return runs with those streams current, which by then wait for
/// the last read.
struct OutTensor {
  at::Tensor tensor;
  bool lent = false;
  absl::AnyInvocable<void()> on_return;
};
OutTensor Copy(at::Tensor tensor);
OutTensor Lend(at::Tensor tensor, absl::AnyInvocable<void()> on_return = nullptr);

/// What a tensor on the wire is, known before its bytes move. Always dense and contiguous.
struct TensorMeta {
  at::ScalarType dtype = at::ScalarType::Float;
  std::vector<int64_t> sizes;
  c10::Device device = c10::Device(c10::kCPU);  ///< Where it lands, in the receiver's words.
  size_t bytes() const;
};

/// What travels beside a message's content, for interceptors: a context's id, a trace. Keys are at most 64 bytes
/// of [a-z0-9_.]; at most 64 entries and 16 KiB.
using Metadata = std::map<std::string, std::string>;

/// The content of a request or reply: plain values encoded with base::ByteWriter, and tensors.
struct Payload {
  std::string body;
  std::vector<OutTensor> tensors;
  Metadata metadata = {};
};
class Streams;
struct Received {
  std::string body;
  std::vector<at::Tensor> tensors;
  Metadata metadata = {};
  /// Of tensors on GPUs: the streams that bring them. A handler, and on_reply, run with these as their
  /// current streams. Whoever takes the tensors elsewhere calls OnConsumed there first.
  std::shared_ptr<const Streams> streams = nullptr;
  /// Makes the calling thread's current streams wait for the tensors, and keeps them for these; does not wait
  /// itself. base::Future does this in the thread that takes a Received out of it.
  void OnConsumed() const;
};

/// Answers one call, once: at once or later, from any thread. Destroyed unused it answers Internal ("the
/// handler dropped the call"; or, where an exception was the reason and came through a handler or a callback of
/// this agent's calls, with its text). Movable. Holds neither a thread nor window while it waits.
class Responder {
 public:
  Responder();
  Responder(Responder&&) noexcept;
  Responder& operator=(Responder&&) noexcept;
  ~Responder();
  /// The caller sees an error with peer, address and method put before its message, and Ran::kYes.
  void Reply(absl::StatusOr<Payload> reply) &&;
  /// One that gives the answer to `reply`, which runs once: to put something before an answer, and for
  /// tests of handlers.
  static Responder From(absl::AnyInvocable<void(absl::StatusOr<Payload>)> reply);

 private:
  friend class UserCode;
  struct State;
  explicit Responder(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

/// A call as its handler sees it.
struct ServerCall {
  base::MemberId caller;
  MethodId method;
  Received request;
  absl::Time deadline;              ///< The caller gives up then (on our clock).
  std::function<bool()> cancelled;  ///< The caller gave up, died, or its deadline passed. Thread-safe.
  /// Asked to stop when the caller gives up or dies: as CallOptions::stop of the calls that the handler makes
  /// for this one it ends them too. Callbacks run on a loop thread: they are short, and neither wait nor throw.
  std::stop_token stop;
  Responder responder;
};
/// An exception that leaves a handler is the answer: Internal, with its type and text (one printable line of
/// about 1 KiB, without LibTorch's backtrace); also where the responder is elsewhere already: its answer then
/// goes nowhere. Of one-way calls it is only logged.
using Handler = std::function<void(ServerCall)>;

struct MethodOptions {
  /// Where handlers run; null: the agent's pool. It must outlive the agent.
  base::Executor* executor = nullptr;
  /// Where the tensors of a request land: one contiguous tensor per meta, of its device, dtype and element
  /// count. Runs on a loop thread before any tensor byte moves: it must not wait. An error refuses the
  /// call (ran: no). Null: fresh memory, on the CPU from a reused pool of the agent. For memory on a GPU the
  /// current streams are those that the bytes come on: let them wait for the last kernel that reads it.
  std::function<absl::StatusOr<std::vector<at::Tensor>>(const base::MemberId& caller, absl::string_view body,
                                                        absl::Span<const TensorMeta> metas)>
      allocate;
};

/// A call that could not be delivered, whose peer had its fill, or whose peer died, is made again, to whoever has
/// the name by then. Within one life of the peer it runs at most once: a session delivers once, and only what did
/// not run is repeated. All within the call's timeout; its tensors are on the CPU.
struct RetryPolicy {
  int max_attempts = 10;                                  ///< At least 1.
  absl::Duration first_backoff = absl::Milliseconds(20);  ///< Before the second; it then doubles, up to
  absl::Duration max_backoff = absl::Seconds(1);
  /// It may run once more in the peer's next life, though it may have run in this one: for methods whose state
  /// ends with the process, or that may run twice.
  bool safe_to_repeat = false;
};

struct CallOptions {
  std::optional<absl::Duration> timeout;  ///< Default: AgentOptions::call_timeout. InfiniteDuration: none.
  /// Where the tensors of the reply land, in order; its count, dtypes and element counts must match
  /// the reply's, else the call fails with FailedPrecondition and nothing was written. If the transfer breaks
  /// in the middle and cannot be resumed the call fails with DataLoss: contents are then undefined.
  /// Those on GPUs are written after what the calling thread's current streams hold when Call is called.
  std::vector<at::Tensor> reply_into;
  /// Runs `on_reply` on the loop thread that brought the reply, without a hop: it must be short and not wait.
  bool reply_inline = false;
  /// Asked to stop, it ends the call with Cancelled, and the handler is told (ServerCall::stop).
  std::stop_token stop = {};
  /// Runs once, on a pool thread, when the peer has the request, and keeps it over any cut: it is then run once
  /// or refused, and the reply says which. Dropped if the call ends before; may run beside on_reply. Of a call
  /// that is made again: at the first attempt that arrives.
  std::function<void()> on_received = nullptr;
  /// Makes the call again where it failed and that may help.
  std::optional<RetryPolicy> retry = std::nullopt;
  /// Where the peer has its fill of calls or bytes (AgentOptions): wait in Call until there is room, at most
  /// `timeout`, and else fail as without it. What does not wait may fill the queue first. Not on a loop thread.
  bool wait_for_room = false;
};

/// What it throws is logged, and answers the calls whose responders it held: so may a handler's work go on.
/// The same holds for callbacks of the futures below.
using OnReply = absl::AnyInvocable<void(absl::StatusOr<Received>)>;

/// A member as the agent knows it.
struct Peer {
  base::MemberId id;
  std::vector<std::string> addresses;  ///< As Endpoint::Connect takes them.
};

/// The CPU, in a device map.
inline constexpr int kCpuIndex = -1;

struct AgentOptions {
  /// Its limits() are those of requests and replies, here and, told when a pipe opens, at peers. Headers
  /// (a body with its inline tensors) of at least 128 KiB.
  std::shared_ptr<transport::Endpoint> endpoint;
  base::MemberId self;
  const base::Clock* clock = nullptr;  ///< Null: the real one.
  int worker_threads = 4;
  absl::Duration call_timeout = absl::Seconds(60);  ///< Of calls that do not say theirs.
  /// Bytes sent to one peer on each lane (those of large tensors travel on one of their own) and not yet
  /// acknowledged; beyond it messages wait in order.
  size_t window_bytes = size_t{256} << 20;
  /// Bytes that may wait for window, per peer; beyond it calls fail with ResourceExhausted (ran: no).
  size_t queue_bytes = size_t{1} << 30;
  /// Of one peer, made by us and not answered; beyond it calls fail with ResourceExhausted (ran: no).
  size_t max_calls_in_flight = 1 << 16;
  size_t inline_bytes = 64 << 10;                      ///< Tensors up to this travel in the header.
  absl::Duration reconnect_limit = absl::Seconds(30);  ///< Then a peer that cannot be reached is dead.
  /// A connection on which nothing that was sent is acknowledged for so long (and a second more for each 4 MiB) is
  /// lost, and made again; the next has twice the time, up to 1,024 times, until something is. Infinite: never.
  absl::Duration stall_limit = absl::Seconds(20);
  size_t max_calls_served = 1 << 16;  ///< Unanswered, of one peer; beyond it they are refused.
  /// Of one peer's requests that came in, one-way ones too, and wait for a thread to run their handler; beyond
  /// it they are refused (ResourceExhausted, ran: no). One is always taken.
  size_t backlog_bytes = size_t{1} << 30;
  size_t keep_buffer_bytes = size_t{256} << 20;  ///< Receive buffers kept for use again.
  /// Peer's name -> index of our GPU -> index of the peer's where tensors of that GPU land in requests to it;
  /// replies of that peer come back the other way. One to one. kCpuIndex on either side is the CPU. A tensor
  /// on a GPU without an entry fails its call with FailedPrecondition (ran: no). Our own name may be there;
  /// without it tensors of calls to ourselves stay on their devices.
  std::map<std::string, std::map<int, int>> device_maps;
};

/// A call on its way out, as an interceptor sees it.
struct OutgoingCall {
  absl::string_view to;
  const MethodId& method;
  bool one_way;
  Payload& request;
  CallOptions& options;  ///< Without effect if one_way.
  OnReply& on_reply;     ///< Null if one_way.
};

/// Sees every call that an agent makes or serves, its own services' and those to itself included. Thread-safe.
/// Several run in the order in which they were added. What one throws is an error of the call.
class Interceptor {
 public:
  virtual ~Interceptor() = default;
  /// In the thread that makes the call. It may change it, and put something before its reply; an error is the
  /// call's (ran: no).
  virtual absl::Status OnCall(OutgoingCall& call) { return absl::OkStatus(); }
  /// When a request is here whole, before its handler is scheduled: on a loop thread (of a call to ourselves: in
  /// the calling thread), so it neither waits nor works long. It may change the call, and put something before
  /// its answer (Responder::From); an error refuses it (ran: no).
  virtual absl::Status OnServe(ServerCall& call) { return absl::OkStatus(); }
};

/// Thread-safe. The destructor is Shutdown with 5 s.
///
/// It belongs to the process that made it (base/fork.h). In a child of fork calls, Meet, Register and Shutdown
/// fail with FailedPrecondition (ran: no) before anything is sent, on_reply runs inside Call (there is no other
/// thread), loans end at once, a Responder answers nobody, and the rest does nothing, the destructor too.
class Agent {
 public:
  static absl::StatusOr<std::unique_ptr<Agent>> Start(AgentOptions options);
  virtual ~Agent() = default;

  /// Serves `method` from now on. AlreadyExists if it is served; InvalidArgument without a name or a handler.
  virtual absl::Status Register(MethodId method, Handler handler, MethodOptions options = {}) = 0;

  /// From now on `interceptor` sees calls, behind those added before.
  virtual void AddInterceptor(std::shared_ptr<Interceptor> interceptor) = 0;

  /// Makes a member known by its name (calls to it then connect when first needed), or replaces an
  /// older incarnation, whose calls fail (ran: maybe).
  virtual void AddPeer(Peer peer) = 0;
  /// Its calls in flight fail with `reason`, which names it, and so do later ones; one log line. A reason
  /// of OK means that it left in order.
  virtual void RemovePeer(const base::MemberId& id, absl::Status reason) = 0;
  virtual std::optional<Peer> FindPeer(absl::string_view name) const = 0;
  /// Learns who answers at `addresses` and makes it known as AddPeer does: for a first contact by address
  /// (the coordinator's). Errors as of Endpoint::Connect; nothing is declared dead.
  virtual base::Future<base::MemberId> Meet(std::vector<std::string> addresses, absl::Duration limit) = 0;
  /// Called (on the thread of failures) when the agent itself sees that a member is dead: its address refuses, or
  /// answers as another incarnation, or reconnect_limit passed. Any number may be added.
  virtual void OnPeerDead(std::function<void(const base::MemberId&, absl::Status)> observer) = 0;

  /// Calls `method` on the member named `to` (which may be ourselves: then nothing touches the network).
  /// `on_reply` (null: nobody is told) runs exactly once, never inside Call: for an answer on the agent's pool, or on
  /// a loop thread if options.reply_inline; for a failure on a thread that all failures share, so that handlers that
  /// hang hold up none: it should not wait there. Errors name peer, address, method, and whether it ran:
  /// NotFound (no such peer; no such method: ran no), DeadlineExceeded, Unavailable (peer died),
  /// ResourceExhausted (too many calls or bytes: ran no), Cancelled (asked to stop, or shut down).
  virtual void Call(absl::string_view to, const MethodId& method, Payload request, CallOptions options,
                    OnReply on_reply) = 0;
  base::Future<Received> Call(absl::string_view to, const MethodId& method, Payload request,
                              CallOptions options = {});

  /// One way: the handler's reply is dropped. The future completes when the peer has taken the request, to be
  /// run once; a refusal (no such method, what `allocate` says, a full backlog) is its error.
  virtual base::Future<base::Unit> Send(absl::string_view to, const MethodId& method, Payload request) = 0;

  virtual const base::MemberId& self() const = 0;
  virtual std::vector<std::string> addresses() const = 0;
  virtual base::Executor* pool() = 0;
  virtual base::Timer* timer() = 0;
  virtual const base::Clock* clock() const = 0;
  virtual transport::Endpoint* endpoint() = 0;

  /// When something of this incarnation last came in (of clock()); InfinitePast if nothing is known of it.
  virtual absl::Time LastHeard(const base::MemberId& id) const = 0;

  /// Refuses new calls, lets handlers that run end (for at most half of `limit`), drains what is unsent and
  /// unacknowledged (their answers too), tells the peers (up to 0.5 s on top), then closes and joins; what is
  /// left at `limit` is dropped, and the error says what. Calls whose
  /// handler has returned and left the answer for later are not waited for. Idempotent. Not on a pool thread,
  /// nor in a handler.
  virtual absl::Status Shutdown(absl::Duration limit) = 0;
};

}  // namespace Atoll::rpc
