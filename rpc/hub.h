// What the sessions of one agent share: its options, threads, methods and peers. Internal to rpc.
//
//   AgentImpl (owns threads) ──> Hub <── Session (one a peer) <── pipes' callbacks, responders, timers
//
// Held by shared_ptr: a Responder or a callback may outlive the agent, and then finds the hub closed and
// without threads. Thread-safe. Lock order: a Session's mutex before the hub's; never two sessions'.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/clock.h"
#include "atoll/base/executor.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/buffer_pool.h"

namespace Atoll::rpc {

class Session;

struct Method {
  Handler handler;
  MethodOptions options;
};

class Hub : public std::enable_shared_from_this<Hub> {
 public:
  explicit Hub(const AgentOptions& options);

  const AgentOptions& options() const { return options_; }
  const base::MemberId& self() const { return options_.self; }
  absl::Time Now() const { return options_.clock->Now(); }
  const transport::MessageLimits& limits() const { return limits_; }
  BufferPool& buffers() { return *buffers_; }
  /// Valid until the agent has joined it; no callback of it runs after that.
  transport::Endpoint* endpoint() const { return options_.endpoint.get(); }

  /// Threads. After DetachThreads tasks run in the calling thread, and timers never.
  void AttachThreads(base::ThreadPool* pool, base::ThreadPool* failures, base::Timer* timer);
  void DetachThreads();
  void Schedule(base::Task task);
  /// Schedule, as an executor that lives as long as this.
  base::Executor* executor() { return &executor_; }
  /// For what must not wait behind handlers that never return: ends of calls that failed.
  void ScheduleFailure(base::Task task);
  base::Timer::Id At(absl::Time when, base::Task task);
  void Cancel(base::Timer::Id id);

  /// Methods.
  absl::Status Register(MethodId id, Handler handler, MethodOptions options);
  /// Null if it is not served; `why` then says what is.
  std::shared_ptr<const Method> FindMethod(const MethodId& id, std::string* why) const;
  /// A request that may run: while one lives, AwaitServed waits. Movable, and empty once moved from.
  class Serving {
   public:
    Serving() = default;
    Serving(Serving&& other) noexcept : hub_(std::move(other.hub_)) {}
    Serving& operator=(Serving&&) = delete;
    ~Serving();
    explicit operator bool() const { return hub_ != nullptr; }

   private:
    friend class Hub;
    explicit Serving(std::shared_ptr<Hub> hub) : hub_(std::move(hub)) {}
    std::shared_ptr<Hub> hub_;
  };
  /// Empty once the agent shuts down: the request is then refused.
  Serving BeginServing();
  /// Runs `call` on its method's executor, `on_start` before it.
  void Dispatch(Serving serving, std::shared_ptr<const Method> method, ServerCall call,
                absl::AnyInvocable<void()> on_start = nullptr);
  /// After BeginShutdown: waits until no handler runs or is about to. False at the end of `limit`.
  bool AwaitServed(absl::Duration limit);

  void AddInterceptor(std::shared_ptr<Interceptor> interceptor);
  absl::Status OnCall(OutgoingCall& call) const;
  absl::Status OnServe(ServerCall& call) const;

  /// Peers. Each name has at most one session, dead ones included.
  std::shared_ptr<Session> FindSession(absl::string_view name) const;
  std::vector<std::shared_ptr<Session>> Sessions() const;
  void AddPeer(Peer peer);
  void OnPipe(std::shared_ptr<transport::Pipe> pipe);
  void Observe(std::function<void(const base::MemberId&, absl::Status)> observer);
  void NotifyDead(const base::MemberId& id, const absl::Status& reason);
  /// The endpoint carries nothing any more: so end all sessions, and those to come.
  void OnBroken(const absl::Status& reason);

  /// From now on calls are refused, here and from peers.
  void BeginShutdown() { shutting_down_.store(true); }
  bool shutting_down() const { return shutting_down_.load(); }
  /// Forgets all sessions.
  void Clear();

 private:
  template <class F>
  absl::Status Intercept(F see) const;
  // The session of the incarnation `id`, which becomes the one of its name: what it had as a visitor, or new.
  std::shared_ptr<Session> TakeVisitorLocked(const base::MemberId& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetDeadVisitors();

  struct Executor : base::Executor {
    explicit Executor(Hub* hub_in) : hub(hub_in) {}
    void Schedule(base::Task task) override { hub->Schedule(std::move(task)); }
    Hub* const hub;
  };

  AgentOptions options_;
  Executor executor_{this};
  const transport::MessageLimits limits_;  // The endpoint's.
  const std::shared_ptr<BufferPool> buffers_;
  std::atomic<bool> shutting_down_{false};
  std::atomic<int> serving_{0};
  std::atomic<bool> intercepted_{false};  // There are interceptors.
  absl::Mutex served_mu_;                 // Guards nothing: its release makes AwaitServed look again.

  mutable absl::Mutex threads_mu_;
  base::ThreadPool* pool_ ABSL_GUARDED_BY(threads_mu_) = nullptr;
  base::ThreadPool* failures_ ABSL_GUARDED_BY(threads_mu_) = nullptr;
  base::Timer* timer_ ABSL_GUARDED_BY(threads_mu_) = nullptr;

  mutable absl::Mutex mu_;
  absl::flat_hash_map<MethodId, std::shared_ptr<const Method>> methods_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<Interceptor>> interceptors_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, std::shared_ptr<Session>> sessions_ ABSL_GUARDED_BY(mu_);
  // Other incarnations of a name whose session lives, by incarnation. They may call us (to ask to join, and
  // be told by whom the name is held); we call them once they have the name.
  absl::flat_hash_map<uint64_t, std::shared_ptr<Session>> visitors_ ABSL_GUARDED_BY(mu_);
  // Incarnations that were replaced: what they still send is refused. The newest, oldest first in the order.
  void MarkReplacedLocked(base::Incarnation incarnation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::flat_hash_set<uint64_t> replaced_ ABSL_GUARDED_BY(mu_);
  std::deque<uint64_t> replaced_order_ ABSL_GUARDED_BY(mu_);
  std::vector<std::function<void(const base::MemberId&, absl::Status)>> observers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::rpc
