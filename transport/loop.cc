#include "atoll/transport/loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport {
namespace {
constexpr uint64_t kWakeId = 0;
constexpr int kEventsAtOnce = 64;
}  // namespace

absl::StatusOr<std::unique_ptr<Loop>> Loop::Create(std::string thread_name, const base::Clock* clock) {
  Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return DescriptorError(errno, "epoll_create1");
  Fd wake(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.valid()) return DescriptorError(errno, "eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeId;
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0)
    return base::ErrnoStatus(errno, "epoll_ctl");
  return std::unique_ptr<Loop>(new Loop(std::move(thread_name), clock, std::move(epoll), std::move(wake)));
}

Loop::Loop(std::string thread_name, const base::Clock* clock, Fd epoll, Fd wake)
    : name_(std::move(thread_name)),
      epoll_(std::move(epoll)),
      wake_(std::move(wake)),
      clock_(clock != nullptr ? *clock : real_clock_) {
  thread_ = std::thread([this] { Run(); });
}

Loop::~Loop() { ATOLL_CHECK(!thread_.joinable()) << "a loop must be joined before it is destroyed"; }

void Loop::Defer(Task task) {
  bool wake = false;
  {
    absl::MutexLock lock(&mu_);
    if (!ended_) {
      tasks_.push_back(std::move(task));
      // The loop itself looks at the queue before it waits again; more than one wake-up is waste.
      wake = tasks_.size() == 1 && !InLoop();
    } else {
      tasks_.push_back(std::move(task));
      if (inline_running_) return;
      inline_running_ = true;
    }
    if (!ended_ && !wake) return;
  }
  if (wake) {
    const uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof(one));
    return;
  }
  while (true) {
    Task next;
    {
      absl::MutexLock lock(&mu_);
      if (tasks_.empty()) {
        inline_running_ = false;
        return;
      }
      next = std::move(tasks_.front());
      tasks_.pop_front();
    }
    Guarded(std::move(next));
  }
}

absl::StatusOr<Loop::HandlerId> Loop::Register(int fd, uint32_t events, std::shared_ptr<Handler> handler) {
  HandlerId id;
  {
    absl::MutexLock lock(&mu_);
    if (ended_) return absl::CancelledError("the loop has ended");
    id = next_handler_++;
    handlers_[id] = std::move(handler);
  }
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    const int error = errno;
    absl::MutexLock lock(&mu_);
    handlers_.erase(id);
    return base::ErrnoStatus(error, "epoll_ctl");
  }
  return id;
}

bool Loop::Modify(int fd, HandlerId id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  return epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0;
}

void Loop::Unregister(int fd, HandlerId id) {
  std::shared_ptr<Handler> last;  // Destroyed without the lock.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  absl::MutexLock lock(&mu_);
  auto it = handlers_.find(id);
  if (it == handlers_.end()) return;
  last = std::move(it->second);
  handlers_.erase(it);
}

Loop::TimerId Loop::At(absl::Time when, Task task) {
  {
    absl::MutexLock lock(&mu_);
    if (ended_) return {};
  }
  const TimerId id(when, next_timer_++);
  timers_.emplace(id, std::move(task));
  return id;
}

void Loop::Cancel(TimerId id) { timers_.erase(id); }

void Loop::Stop(absl::Duration limit, std::function<bool()> drained) {
  {
    absl::MutexLock lock(&mu_);
    if (stopping_) return;
    stopping_ = true;
    end_by_ = real_clock_.Now() + limit;
    drained_ = std::move(drained);
  }
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));
}

void Loop::Join() {
  {
    absl::MutexLock lock(&mu_);
    ATOLL_CHECK(!InLoop()) << "Join on a loop thread waits for itself";
    if (joined_) {
      auto ended = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return ended_; };
      mu_.Await(absl::Condition(&ended));
      return;
    }
    joined_ = true;
  }
  thread_.join();
}

void Loop::Guarded(absl::AnyInvocable<void()> work) {
  std::string what;
  try {
    return std::move(work)();
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
    what = "something that is no std::exception";
  }
  ATOLL_LOG(kError) << "exception on a transport loop: " << what;
  if (InLoop() && on_exception_) on_exception_(what.c_str());
}

void Loop::Dispatch(uint64_t id, uint32_t events) {
  std::shared_ptr<Handler> handler;
  {
    absl::MutexLock lock(&mu_);
    auto it = handlers_.find(id);
    if (it == handlers_.end()) return;  // Unregistered earlier in this batch.
    handler = it->second;
  }
  Guarded([&] { handler->OnEventsOnLoop(events); });
}

void Loop::RunTasks() {
  std::deque<Task> tasks;
  {
    absl::MutexLock lock(&mu_);
    tasks.swap(tasks_);
  }
  for (Task& task : tasks) Guarded(std::move(task));
}

absl::Duration Loop::RunTimers() {
  while (!timers_.empty()) {
    const absl::Time now = clock_.Now();
    auto first = timers_.begin();
    if (first->first.first > now) return first->first.first - now;
    Task task = std::move(first->second);
    timers_.erase(first);
    Guarded(std::move(task));
  }
  return absl::InfiniteDuration();
}

bool Loop::TryEnd() {
  std::function<bool()> drained;
  absl::Time end_by;
  {
    absl::MutexLock lock(&mu_);
    if (!stopping_ || !tasks_.empty()) return false;
    drained = drained_;
    end_by = end_by_;
  }
  if (drained && !drained() && real_clock_.Now() < end_by) return false;
  // Before the end: from then on other threads run tasks, and what is dropped here may have some.
  DropAll();
  absl::MutexLock lock(&mu_);
  if (!tasks_.empty() || !timers_.empty() || !handlers_.empty()) return false;  // Those came meanwhile.
  ended_ = true;
  return true;
}

void Loop::DropAll() {
  std::map<TimerId, Task> timers;
  timers.swap(timers_);
  // Destroyed without the lock: a handler's members may call back into the loop.
  std::unordered_map<HandlerId, std::shared_ptr<Handler>> handlers;
  absl::MutexLock lock(&mu_);
  handlers.swap(handlers_);
}

void Loop::Run() {
  loop_thread_.store(std::this_thread::get_id(), std::memory_order_release);
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  epoll_event events[kEventsAtOnce];
  while (true) {
    RunTasks();
    absl::Duration wait = RunTimers();
    if (TryEnd()) break;
    {
      absl::MutexLock lock(&mu_);
      if (!tasks_.empty()) wait = absl::ZeroDuration();
      if (stopping_) wait = std::min(wait, absl::Milliseconds(5));
    }
    // Rounded up: a timer must not be found early and spun upon.
    const int timeout_ms = wait == absl::InfiniteDuration()
                               ? -1
                               : static_cast<int>(std::min<int64_t>(
                                     absl::ToInt64Milliseconds(wait + absl::Microseconds(999)), 60000));
    const int count = epoll_wait(epoll_.get(), events, kEventsAtOnce, timeout_ms);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kWakeId) {
        uint64_t ignored;
        (void)!read(wake_.get(), &ignored, sizeof(ignored));
        continue;
      }
      Dispatch(events[i].data.u64, events[i].events);
    }
  }
  loop_thread_.store(std::thread::id(), std::memory_order_release);
}

}  // namespace Atoll::transport
