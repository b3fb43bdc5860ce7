// Where work runs. Loops (of transport) never wait; everything that may wait runs on one of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/base/clock.h"
#include "atoll/base/fork.h"

namespace Atoll::base {

using Task = absl::AnyInvocable<void()>;

/// Runs tasks. Thread-safe. A task must not throw.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void Schedule(Task task) = 0;
};

/// Runs a task at once, in the calling thread.
class InlineExecutor : public Executor {
 public:
  void Schedule(Task task) override { std::move(task)(); }
};

/// A pool of threads. A task that is about to wait says so with BlockingScope; another thread of the
/// pool then takes its place (started if there is none to spare, up to `max_threads` in all), so that
/// nested calls do not deadlock with one worker thread. Threads once started stay as spares: a wait
/// costs no thread start. The destructor runs what is queued, then joins; not on a pool thread. A child of fork has
/// none of the threads: there nothing runs, and the destructor drops the rest.
class ThreadPool : public Executor {
 public:
  struct Options {
    std::string name = "pool";  ///< Of the threads, as `top -H` shows it (15 characters).
    int threads = 4;            ///< Threads that run tasks at one time.
    int max_threads = 256;      ///< With the replacements of those that wait.
  };
  explicit ThreadPool(Options options);
  ~ThreadPool() override;
  void Schedule(Task task) override;
  /// Waits until nothing is queued or runs. False if something still does after `limit`. Not on a pool
  /// thread.
  bool Drain(absl::Duration limit);

  /// Marks the calling thread as waiting. On a thread of no pool it does nothing.
  class BlockingScope {
   public:
    BlockingScope();
    ~BlockingScope();
    BlockingScope(const BlockingScope&) = delete;
    BlockingScope& operator=(const BlockingScope&) = delete;
    /// False when the pool is at max_threads and no replacement could start: the caller should fail
    /// with ResourceExhausted instead of waiting.
    bool ok() const { return ok_; }

   private:
    ThreadPool* pool_;
    bool ok_ = true;
  };

 private:
  void Run();
  void StartThreadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Sees to it that queued work is taken, if fewer tasks run than may.
  void WakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int LiveLocked() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return static_cast<int>(threads_.size()); }

  const ForkMark fork_mark_;
  const Options options_;
  absl::Mutex mu_;
  absl::CondVar work_;  // For threads that are idle.
  std::deque<Task> queue_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  int idle_ ABSL_GUARDED_BY(mu_) = 0;     // In Run, without a task (started and woken ones included).
  int running_ ABSL_GUARDED_BY(mu_) = 0;  // In a task, and not in a BlockingScope.
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

/// Runs tasks one after another, in the order scheduled, on another executor. Held by shared_ptr: a
/// queued task keeps it alive.
class SerialExecutor : public Executor, public std::enable_shared_from_this<SerialExecutor> {
 public:
  /// `target` must outlive this.
  static std::shared_ptr<SerialExecutor> Create(Executor* target);
  void Schedule(Task task) override;

 private:
  explicit SerialExecutor(Executor* target) : target_(target) {}
  void RunSome();

  Executor* const target_;
  absl::Mutex mu_;
  std::deque<Task> queue_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = false;
};

/// Runs tasks at a time, on a thread of its own that user code cannot block: tasks given to it must
/// be short and never wait. The destructor drops what has not come due. In a child of fork nothing runs.
class Timer {
 public:
  using Id = uint64_t;
  explicit Timer(const Clock* clock);
  ~Timer();
  /// `task` runs once at `when` or soon after. InfiniteFuture never runs. Id 0 is never given.
  Id At(absl::Time when, Task task);
  /// True if the task had not started and now never will.
  bool Cancel(Id id);
  /// Tasks that wait for their time.
  size_t pending() const;

 private:
  void Run();

  const ForkMark fork_mark_;
  const Clock* const clock_;
  mutable absl::Mutex mu_;
  absl::CondVar changed_;
  std::map<std::pair<absl::Time, Id>, Task> due_ ABSL_GUARDED_BY(mu_);
  std::map<Id, absl::Time> when_ ABSL_GUARDED_BY(mu_);
  Id next_ ABSL_GUARDED_BY(mu_) = 1;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace Atoll::base
