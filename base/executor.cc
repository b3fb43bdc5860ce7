#include "atoll/base/executor.h"

#include <pthread.h>

#include <utility>

#include "atoll/base/log.h"

namespace Atoll::base {
namespace {

// Which pool the calling thread works for, so that a wait deep inside user code can declare itself.
thread_local ThreadPool* t_pool = nullptr;

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
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    threads.swap(threads_);
  }
  // A task still running may wait and start a replacement: join until none is left.
  while (!threads.empty()) {
    for (std::thread& thread : threads) thread.join();
    threads.clear();
    absl::MutexLock lock(&mu_);
    threads.swap(threads_);
  }
}

void ThreadPool::Schedule(Task task) {
  absl::MutexLock lock(&mu_);
  queue_.push_back(std::move(task));
}

void ThreadPool::StartThreadLocked() {
  ++live_;
  threads_.emplace_back([this] { Run(); });
}

void ThreadPool::Run() {
  t_pool = this;
  SetThreadName(options_.name);
  auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !queue_.empty() || stopping_ || live_ - waiting_ > options_.threads;
  };
  mu_.Lock();
  while (true) {
    ++idle_;
    mu_.Await(absl::Condition(&wake));
    --idle_;
    // More runnable threads than wanted: those that waited have come back.
    bool surplus = live_ - waiting_ > options_.threads;
    if (queue_.empty() ? (stopping_ || surplus) : false) break;
    if (queue_.empty()) continue;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    mu_.Unlock();
    std::move(task)();
    task = nullptr;  // Its captures are released before the lock is taken.
    mu_.Lock();
  }
  --live_;
  mu_.Unlock();
}

ThreadPool::BlockingScope::BlockingScope() : pool_(t_pool) {
  if (pool_ == nullptr) return;
  absl::MutexLock lock(&pool_->mu_);
  ++pool_->waiting_;
  if (pool_->live_ - pool_->waiting_ >= pool_->options_.threads) return;
  if (pool_->live_ < pool_->options_.max_threads) {
    pool_->StartThreadLocked();
  } else if (pool_->live_ == pool_->waiting_) {
    ok_ = false;  // Every thread waits: nobody is left to run what they wait for.
  }
}

ThreadPool::BlockingScope::~BlockingScope() {
  if (pool_ == nullptr) return;
  absl::MutexLock lock(&pool_->mu_);
  --pool_->waiting_;
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
      changed_.WaitWithTimeout(&mu_, left);
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
