// Lets ThreadSanitizer see Abseil's locks. Debian's Abseil is not instrumented and its Mutex is built on
// futexes, so that without this every access under an absl::Mutex is reported as a race. Linked into
// everything of a thread-sanitized build, with --wrap for each function below (AtollBuild.cmake): a call
// of Mutex::Lock comes here, tells the sanitizer, and goes on to the real one.
#include <sanitizer/tsan_interface.h>

#include <cstdint>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

// `mangled` is the whole name, with the inline namespace of Debian's Abseil.
#define ATOLL_WRAP(result, mangled, ...)           \
  extern "C" result __real_##mangled(__VA_ARGS__); \
  extern "C" result __wrap_##mangled(__VA_ARGS__)
#define ATOLL_REAL(mangled) __real_##mangled

namespace {

using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Time;

// A lock taken exclusively (flags 0) or shared; what happens inside the real function is not looked at.
class Locking {
 public:
  Locking(Mutex* mu, unsigned flags) : mu_(mu), flags_(flags) { __tsan_mutex_pre_lock(mu, flags); }
  ~Locking() { __tsan_mutex_post_lock(mu_, flags_, 0); }
  void Failed() { flags_ |= __tsan_mutex_try_lock_failed; }

 private:
  Mutex* mu_;
  unsigned flags_;
};

// A wait gives the lock up and takes it again.
class Waiting {
 public:
  explicit Waiting(Mutex* mu) : released_(mu), taken_(mu, 0) {}

 private:
  struct Released {
    explicit Released(Mutex* mu) {
      __tsan_mutex_pre_unlock(mu, 0);
      __tsan_mutex_post_unlock(mu, 0);
    }
  } released_;
  Locking taken_;
};

}  // namespace

ATOLL_WRAP(void, _ZN4absl7debian35Mutex4LockEv, Mutex* mu) {
  Locking locking(mu, 0);
  ATOLL_REAL(_ZN4absl7debian35Mutex4LockEv)(mu);
}
ATOLL_WRAP(bool, _ZN4absl7debian35Mutex7TryLockEv, Mutex* mu) {
  Locking locking(mu, __tsan_mutex_try_lock);
  bool taken = ATOLL_REAL(_ZN4absl7debian35Mutex7TryLockEv)(mu);
  if (!taken) locking.Failed();
  return taken;
}
ATOLL_WRAP(void, _ZN4absl7debian35Mutex6UnlockEv, Mutex* mu) {
  __tsan_mutex_pre_unlock(mu, 0);
  ATOLL_REAL(_ZN4absl7debian35Mutex6UnlockEv)(mu);
  __tsan_mutex_post_unlock(mu, 0);
}
ATOLL_WRAP(void, _ZN4absl7debian35Mutex10ReaderLockEv, Mutex* mu) {
  Locking locking(mu, __tsan_mutex_read_lock);
  ATOLL_REAL(_ZN4absl7debian35Mutex10ReaderLockEv)(mu);
}
ATOLL_WRAP(void, _ZN4absl7debian35Mutex12ReaderUnlockEv, Mutex* mu) {
  __tsan_mutex_pre_unlock(mu, __tsan_mutex_read_lock);
  ATOLL_REAL(_ZN4absl7debian35Mutex12ReaderUnlockEv)(mu);
  __tsan_mutex_post_unlock(mu, __tsan_mutex_read_lock);
}
ATOLL_WRAP(void, _ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE, Mutex* mu, const Condition& condition) {
  Locking locking(mu, 0);
  ATOLL_REAL(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)(mu, condition);
}
ATOLL_WRAP(bool, _ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE, Mutex* mu,
           const Condition& condition, Duration limit) {
  Locking locking(mu, 0);
  return ATOLL_REAL(_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
      mu, condition, limit);
}
ATOLL_WRAP(void, _ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE, Mutex* mu, const Condition& condition) {
  Waiting waiting(mu);
  ATOLL_REAL(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE)(mu, condition);
}
ATOLL_WRAP(bool, _ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE, Mutex* mu,
           const Condition& condition, Duration limit) {
  Waiting waiting(mu);
  return ATOLL_REAL(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(mu, condition,
                                                                                              limit);
}
ATOLL_WRAP(bool, _ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE, Mutex* mu,
           const Condition& condition, Time deadline) {
  Waiting waiting(mu);
  return ATOLL_REAL(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(mu, condition,
                                                                                           deadline);
}
ATOLL_WRAP(void, _ZN4absl7debian35MutexD1Ev, Mutex* mu) {
  __tsan_mutex_destroy(mu, 0);
  ATOLL_REAL(_ZN4absl7debian35MutexD1Ev)(mu);
}
ATOLL_WRAP(void, _ZN4absl7debian37CondVar4WaitEPNS0_5MutexE, CondVar* condition, Mutex* mu) {
  Waiting waiting(mu);
  ATOLL_REAL(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE)(condition, mu);
}
ATOLL_WRAP(bool, _ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE, CondVar* condition,
           Mutex* mu, Duration limit) {
  Waiting waiting(mu);
  return ATOLL_REAL(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE)(condition, mu,
                                                                                          limit);
}
ATOLL_WRAP(bool, _ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE, CondVar* condition,
           Mutex* mu, Time deadline) {
  Waiting waiting(mu);
  return ATOLL_REAL(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE)(condition, mu,
                                                                                       deadline);
}

// Notification keeps an atomic that its own, uninstrumented code writes.
ATOLL_WRAP(void, _ZN4absl7debian312Notification6NotifyEv, void* notification) {
  __tsan_release(notification);
  ATOLL_REAL(_ZN4absl7debian312Notification6NotifyEv)(notification);
}
ATOLL_WRAP(void, _ZN4absl7debian312NotificationD1Ev, void* notification) {
  ATOLL_REAL(_ZN4absl7debian312NotificationD1Ev)(notification);
  __tsan_acquire(notification);
}
ATOLL_WRAP(void, _ZNK4absl7debian312Notification19WaitForNotificationEv, void* notification) {
  ATOLL_REAL(_ZNK4absl7debian312Notification19WaitForNotificationEv)(notification);
  __tsan_acquire(notification);
}
ATOLL_WRAP(bool, _ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE,
           void* notification, Duration limit) {
  bool notified = ATOLL_REAL(_ZNK4absl7debian312Notification30WaitForNotificationWithTimeoutENS0_8DurationE)(
      notification, limit);
  if (notified) __tsan_acquire(notification);
  return notified;
}
ATOLL_WRAP(bool, _ZN4absl7debian315BlockingCounter14DecrementCountEv, void* counter) {
  __tsan_release(counter);
  return ATOLL_REAL(_ZN4absl7debian315BlockingCounter14DecrementCountEv)(counter);
}
ATOLL_WRAP(void, _ZN4absl7debian315BlockingCounter4WaitEv, void* counter) {
  ATOLL_REAL(_ZN4absl7debian315BlockingCounter4WaitEv)(counter);
  __tsan_acquire(counter);
}

// The last owner of a shared status frees what the others have read.
ATOLL_WRAP(void, _ZN4absl7debian36Status15UnrefNonInlinedEm, uintptr_t rep) {
  __tsan_release(reinterpret_cast<void*>(rep & ~uintptr_t{3}));
  __tsan_acquire(reinterpret_cast<void*>(rep & ~uintptr_t{3}));
  ATOLL_REAL(_ZN4absl7debian36Status15UnrefNonInlinedEm)(rep);
}
