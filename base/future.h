// A value that comes later. A Promise is completed once (a second completion is ignored and says
// so); its Futures can be waited for with a limit, or continued with a callback.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/base/clock.h"
#include "atoll/base/executor.h"

namespace Atoll::base {

/// The value of calls that only succeed or fail.
struct Unit {};

template <class T>
class Future;

/// A value that is bound to the thread that takes it (tensors whose order is that thread's streams') is told
/// so there, if it has a member OnConsumed; a vector's elements are.
template <class T>
void TellConsumed(const absl::StatusOr<T>& result) {
  if constexpr (requires(const T& value) { value.OnConsumed(); }) {
    if (result.ok()) result->OnConsumed();
  } else if constexpr (requires(const T& values) { values.begin()->OnConsumed(); }) {
    if (!result.ok()) return;
    for (const auto& value : *result) value.OnConsumed();
  }
}

template <class T>
class Promise {
 public:
  Promise() : state_(std::make_shared<State>()) {}
  Future<T> future() const { return Future<T>(state_); }
  /// True if this completed it. Callbacks run in the calling thread, without a lock; what the first of those
  /// that throw throws comes out when all have run.
  bool Set(absl::StatusOr<T> result) const {
    std::vector<Callback> callbacks;
    {
      absl::MutexLock lock(&state_->mu);
      if (state_->result.has_value()) return false;
      state_->result.emplace(std::move(result));
      callbacks.swap(state_->callbacks);
    }
    if (!callbacks.empty()) TellConsumed(state_->Final());
    RunAll(callbacks, *state_);
    return true;
  }
  /// As Set, for threads that must not run other people's code: waiters wake at once, callbacks run on
  /// `executor`.
  bool SetOn(Executor* executor, absl::StatusOr<T> result) const {
    std::vector<Callback> callbacks;
    {
      absl::MutexLock lock(&state_->mu);
      if (state_->result.has_value()) return false;
      state_->result.emplace(std::move(result));
      callbacks.swap(state_->callbacks);
    }
    if (callbacks.empty()) return true;
    executor->Schedule([state = state_, callbacks = std::move(callbacks)]() mutable {
      TellConsumed(state->Final());
      RunAll(callbacks, *state);
    });
    return true;
  }

 private:
  friend class Future<T>;
  using Callback = absl::AnyInvocable<void(const absl::StatusOr<T>&)>;
  struct State {
    absl::Mutex mu;
    std::optional<absl::StatusOr<T>> result ABSL_GUARDED_BY(mu);  // Immutable once there.
    std::vector<Callback> callbacks ABSL_GUARDED_BY(mu);
    // Requires that the result is there.
    const absl::StatusOr<T>& Final() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return *result; }
  };
  static void RunAll(std::vector<Callback>& callbacks, const State& state) {
    std::exception_ptr thrown;
    for (Callback& callback : callbacks) {
      try {
        std::move(callback)(state.Final());
      } catch (...) {
        if (thrown == nullptr) thrown = std::current_exception();
      }
    }
    if (thrown != nullptr) std::rethrow_exception(thrown);
  }
  std::shared_ptr<State> state_;
};

/// Copyable: all copies see one result.
template <class T>
class Future {
 public:
  /// Waits at most `limit`. DeadlineExceeded if nothing came: what was asked for goes on. On a pool
  /// thread the wait declares itself (ThreadPool::BlockingScope).
  absl::StatusOr<T> Wait(absl::Duration limit) const {
    ThreadPool::BlockingScope blocking;
    if (!blocking.ok()) {
      return absl::ResourceExhaustedError(
          "every thread of the pool waits: more nested calls than its max_threads");
    }
    auto done = [state = state_.get()]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return state->result.has_value(); };
    {
      absl::MutexLock lock(&state_->mu);
      if (!AwaitFor(state_->mu, absl::Condition(&done), limit)) {
        return absl::DeadlineExceededError(absl::StrCat("no result within ", absl::FormatDuration(limit)));
      }
    }
    TellConsumed(state_->Final());
    return state_->Final();
  }
  bool ready() const {
    absl::MutexLock lock(&state_->mu);
    return state_->result.has_value();
  }
  /// Runs `callback` once with the result: now, in the calling thread, or in the thread that
  /// completes the promise.
  void Then(absl::AnyInvocable<void(const absl::StatusOr<T>&)> callback) const {
    if (callback == nullptr) return;
    {
      absl::MutexLock lock(&state_->mu);
      if (!state_->result.has_value()) {
        state_->callbacks.push_back(std::move(callback));
        return;
      }
    }
    TellConsumed(state_->Final());
    std::move(callback)(state_->Final());
  }
  void Then(std::nullptr_t) const = delete;

 private:
  friend class Promise<T>;
  explicit Future(std::shared_ptr<typename Promise<T>::State> state) : state_(std::move(state)) {}
  std::shared_ptr<typename Promise<T>::State> state_;
};

/// The values of all, in their order; or, as soon as there is one, the first error. What the others bring is then
/// dropped.
template <class T>
Future<std::vector<T>> WhenAll(const std::vector<Future<T>>& futures) {
  struct Gathered {
    absl::Mutex mu;
    std::vector<std::optional<T>> values ABSL_GUARDED_BY(mu);
    size_t missing ABSL_GUARDED_BY(mu) = 0;
  };
  Promise<std::vector<T>> promise;
  if (futures.empty()) promise.Set(std::vector<T>());
  auto gathered = std::make_shared<Gathered>();
  {
    absl::MutexLock lock(&gathered->mu);
    gathered->values.resize(futures.size());
    gathered->missing = futures.size();
  }
  for (size_t i = 0; i < futures.size(); ++i) {
    futures[i].Then([gathered, promise, i](const absl::StatusOr<T>& result) {
      if (!result.ok()) {
        promise.Set(result.status());
        return;
      }
      std::vector<T> values;
      {
        absl::MutexLock lock(&gathered->mu);
        gathered->values[i] = *result;
        if (--gathered->missing > 0) return;
        for (std::optional<T>& value : gathered->values) values.push_back(*std::move(value));
      }
      promise.Set(std::move(values));
    });
  }
  return promise.future();
}

}  // namespace Atoll::base
