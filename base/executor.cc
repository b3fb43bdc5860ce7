#include "atoll/base/executor.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "atoll/base/log.h"

namespace Atoll::base {
namespace {

// Which pool the calling thread works for, so that a wait deep inside user code can declare itself; and in
// how many such waits, one inside another, it is.
thread_local struct {
  ThreadPool* pool = nullptr;
  int waits = 0;
} t_worker;

// How many tasks a serial queue runs before it lets others on its executor have a turn.
constexpr int kSerialTurn = 16;

void SetThreadName(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

}  // namespace

ThreadPool::ThreadPool(Options options) : options_(std::move(options)) {
  ATOLL_CHECK(options_.threads >= 1 && options_.max_threads >= options_.threads);
  absl::MutexLock lock(&mu_);
  for (int i = 0; i < options_.threads; ++i) StartThreadLocked();
}

ThreadPool::~ThreadPool() {
  if (fork_mark_.in_child()) {
    [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      Abandon(std::move(threads_));
      Abandon(std::move(queue_));
    }();
    return;
  }
  size_t joined = 0;
  while (true) {
    std::thread thread;
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
      work_.SignalAll();
      // A task still running may wait and so start another thread: go on until none is left.
      if (joined == threads_.size()) return;
      thread = std::move(threads_[joined++]);
    }
    thread.join();
  }
}

void ThreadPool::Schedule(Task task) {
  absl::MutexLock lock(&mu_);
  queue_.push_back(std::move(task));
  WakeLocked();
}

bool ThreadPool::Drain(absl::Duration limit) {
  auto drained = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return queue_.empty() && idle_ == LiveLocked(); };
  absl::MutexLock lock(&mu_);
  return AwaitFor(mu_, absl::Condition(&drained), limit);
}

void ThreadPool::StartThreadLocked() {
  ++idle_;
  threads_.emplace_back([this] { Run(); });
}

void ThreadPool::WakeLocked() {
  if (queue_.empty() || running_ >= options_.threads) return;
  if (idle_ > 0) {
    work_.Signal();
  } else if (LiveLocked() < options_.max_threads) {
    StartThreadLocked();
  }
}

void ThreadPool::Run() {
  t_worker.pool = this;
  SetThreadName(options_.name);
  mu_.Lock();
  while (true) {
    while (queue_.empty() ? !stopping_ : running_ >= options_.threads) work_.Wait(&mu_);
    if (queue_.empty()) break;
    --idle_;
    ++running_;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    WakeLocked();  // One signal may have stood for several tasks.
    mu_.Unlock();
    std::move(task)();
    task = nullptr;  // Its captures are released before the lock is taken.
    mu_.Lock();
    --running_;
    ++idle_;
  }
  --idle_;
  work_.SignalAll();  // Others may have gone back to wait while the queue still held something.
  mu_.Unlock();
}

ThreadPool::BlockingScope::BlockingScope() : pool_(t_worker.pool) {
  if (pool_ == nullptr) return;
  absl::MutexLock lock(&pool_->mu_);
  if (t_worker.waits++ == 0) {
    --pool_->running_;
    pool_->WakeLocked();
  }
  // Every thread waits, and no other can start: nobody is left to run what they wait for.
  ok_ = pool_->running_ > 0 || pool_->idle_ > 0 || pool_->LiveLocked() < pool_->options_.max_threads;
}

ThreadPool::BlockingScope::~BlockingScope() {
  if (pool_ == nullptr) return;
  absl::MutexLock lock(&pool_->mu_);
  if (--t_worker.waits == 0) ++pool_->running_;
}

std::shared_ptr<SerialExecutor> SerialExecutor::Create(Executor* target) {
  return std::shared_ptr<SerialExecutor>(new SerialExecutor(target));
}

void SerialExecutor::Schedule(Task task) {
  {
    absl::MutexLock lock(&mu_);
    queue_.push_back(std::move(task));
    if (running_) return;
    running_ = true;
  }
  target_->Schedule([self = shared_from_this()] { self->RunSome(); });
}

void SerialExecutor::RunSome() {
  for (int i = 0; i < kSerialTurn; ++i) {
    Task task;
    {
      absl::MutexLock lock(&mu_);
      if (queue_.empty()) {
        running_ = false;
        return;
      }
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    std::move(task)();
  }
  target_->Schedule([self = shared_from_this()] { self->RunSome(); });
}

Timer::Timer(const Clock* clock) : clock_(clock), thread_([this] { Run(); }) {}

Timer::~Timer() {
  if (fork_mark_.in_child()) {
    [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { Abandon(std::move(due_)); }();
    Abandon(std::move(thread_));
    return;
  }
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
}

Timer::Id Timer::At(absl::Time when, Task task) {
  absl::MutexLock lock(&mu_);
  Id id = next_++;
  if (when == absl::InfiniteFuture() || stopping_) return id;
  bool first = due_.empty() || when < due_.begin()->first.first;
  due_.emplace(std::pair(when, id), std::move(task));
  when_.emplace(id, when);
  if (first) changed_.Signal();
  return id;
}

bool Timer::Cancel(Id id) {
  Task dropped;  // Destroyed after the lock is released: its captures are the user's.
  absl::MutexLock lock(&mu_);
  auto found = when_.find(id);
  if (found == when_.end()) return false;
  auto due = due_.find({found->second, id});
  dropped = std::move(due->second);
  due_.erase(due);
  when_.erase(found);
  return true;
}

size_t Timer::pending() const {
  absl::MutexLock lock(&mu_);
  return due_.size();
}

void Timer::Run() {
  SetThreadName("timer");
  mu_.Lock();
  while (!stopping_) {
    if (due_.empty()) {
      changed_.Wait(&mu_);
      continue;
    }
    auto first = due_.begin();
    absl::Duration left = first->first.first - clock_->Now();
    if (left > absl::ZeroDuration()) {
      changed_.WaitWithTimeout(&mu_, std::min(left, kLongestWait));  // The date may change meanwhile.
      continue;
    }
    Task task = std::move(first->second);
    when_.erase(first->first.second);
    due_.erase(first);
    mu_.Unlock();
    std::move(task)();
    task = nullptr;
    mu_.Lock();
  }
  mu_.Unlock();
}

}  // namespace Atoll::base
