// One thread that waits for sockets, timers and deferred tasks. It never waits for anything else.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/base/clock.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport {

class Loop {
 public:
  using Task = absl::AnyInvocable<void()>;
  /// What a registered descriptor wakes. Kept alive by the registration, and while it runs.
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void OnEventsOnLoop(uint32_t events) = 0;
  };
  using HandlerId = uint64_t;
  using TimerId = std::pair<absl::Time, uint64_t>;

  /// ResourceExhausted or so if the system gives no descriptors. `clock` is for timers and outlives it; null:
  /// the real one. One that is moved by hand is looked at when something else happens.
  static absl::StatusOr<std::unique_ptr<Loop>> Create(std::string thread_name,
                                                      const base::Clock* clock = nullptr);
  /// Stop() and Join() must have been called.
  ~Loop();

  /// Runs `task` on the loop, after what was deferred before. Any thread. Once the loop has ended, runs
  /// it in the calling thread (one at a time, in order).
  void Defer(Task task);
  bool InLoop() const { return loop_thread_.load(std::memory_order_acquire) == std::this_thread::get_id(); }

  /// Any thread. `events` as in epoll; with EPOLLET readiness that is there already is reported.
  absl::StatusOr<HandlerId> Register(int fd, uint32_t events, std::shared_ptr<Handler> handler);
  /// Other events from now on; readiness that is there already is reported. False if it is not registered. Any
  /// thread.
  bool Modify(int fd, HandlerId id, uint32_t events);
  /// No event is delivered after it returns, if called on the loop. Any thread.
  void Unregister(int fd, HandlerId id);

  /// On the loop only (and in tasks that Defer runs after its end). Dropped unrun when the loop ends.
  TimerId At(absl::Time when, Task task);
  void Cancel(TimerId id);
  absl::Time Now() const { return clock_.Now(); }

  /// An exception that left a handler or task (TensorPipe threw): told once each, on the loop; after its end
  /// nobody is. Set before the first registration.
  void OnException(std::function<void(const char*)> handler) { on_exception_ = std::move(handler); }

  /// Ends the loop once no task is left; `drained`, asked on the loop, may hold the end back for up to
  /// `limit`. Idempotent, any thread, does not wait.
  void Stop(absl::Duration limit, std::function<bool()> drained);
  /// Waits for the end. Idempotent. Not on the loop.
  void Join();

 private:
  Loop(std::string thread_name, const base::Clock* clock, Fd epoll, Fd wake);
  void Run();
  void Dispatch(uint64_t id, uint32_t events);
  void RunTasks();
  absl::Duration RunTimers();
  bool TryEnd();
  void DropAll();
  void Guarded(absl::AnyInvocable<void()> work);

  const std::string name_;
  const Fd epoll_;
  const Fd wake_;
  const base::RealClock real_clock_;
  const base::Clock& clock_;
  std::function<void(const char*)> on_exception_;
  std::map<TimerId, Task> timers_;  // Loop only. Empty once it has ended.
  uint64_t next_timer_ = 1;         // Loop only.

  absl::Mutex mu_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  std::unordered_map<HandlerId, std::shared_ptr<Handler>> handlers_ ABSL_GUARDED_BY(mu_);
  HandlerId next_handler_ ABSL_GUARDED_BY(mu_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool inline_running_ ABSL_GUARDED_BY(mu_) = false;
  bool joined_ ABSL_GUARDED_BY(mu_) = false;
  std::function<bool()> drained_ ABSL_GUARDED_BY(mu_);
  absl::Time end_by_ ABSL_GUARDED_BY(mu_);
  std::atomic<std::thread::id> loop_thread_{};
  std::thread thread_;
};

}  // namespace Atoll::transport
