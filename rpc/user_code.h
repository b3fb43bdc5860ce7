// User code, where rpc runs it: handlers, and the callbacks that go on with a call later. Nothing that it
// throws passes; an exception becomes the answer of the calls that end with it. Internal to rpc.
//
//   handler or callback ── throws ──┬─> responders dropped while the stack unwinds ──┐
//                                   ├─> responders in the callback's own captures ───┼─> Internal, with the text
//                                   └─> the handler's own call, whoever holds it now ┘
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "atoll/base/fork.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

class Hub;

struct Responder::State {
  explicit State(absl::AnyInvocable<void(absl::StatusOr<Payload>)> reply_in) : reply(std::move(reply_in)) {}
  /// The first answer counts. A later one only gives its loans back.
  void Answer(absl::StatusOr<Payload> answer);

  absl::AnyInvocable<void(absl::StatusOr<Payload>)> reply;
  std::atomic<bool> answered{false};
  base::ForkMark fork_mark;
  std::shared_ptr<Hub> hub;  ///< Of a call that a handler runs: an exception may answer before its holder.
};

/// A scope around user code in this thread; scopes nest. It is the one place that knows what was thrown when
/// a Responder was dropped on the way: such a drop waits for the end of the scope.
class UserCode {
 public:
  /// Around what goes on with a call: a callback.
  UserCode();
  /// Around the handler of the call that `responder` answers. Before anybody else has the responder.
  UserCode(const Responder& responder, std::shared_ptr<Hub> hub);
  ~UserCode();
  UserCode(const UserCode&) = delete;
  UserCode& operator=(const UserCode&) = delete;

  /// In the catch block: logs that `what` (method or callback) threw, and answers what ended with it. What is
  /// dropped from now on in this scope is answered so too.
  void Threw(absl::string_view what);

 private:
  friend class Responder;
  static void Dropped(std::shared_ptr<Responder::State> state);

  UserCode* const outer_;
  const int uncaught_;
  const std::shared_ptr<Responder::State> own_;  // Null around a callback.
  std::vector<std::shared_ptr<Responder::State>> dropped_;
  absl::Status failure_;
};

/// `what` of the callbacks of calls.
inline constexpr absl::string_view kOnReply = "what goes on with a reply";
inline constexpr absl::string_view kOnReceived = "what waits for a request's arrival";

/// Runs a callback of the user's (once).
template <class F, class... Args>
void RunCallback(absl::string_view what, F callback, Args&&... args) {
  UserCode scope;
  try {
    std::move(callback)(std::forward<Args>(args)...);
  } catch (...) {
    scope.Threw(what);
    [[maybe_unused]] F ended = std::move(callback);  // And with it, in this scope, what it holds.
  }
}

/// Schedules on another executor what RunCallback then runs.
class CallbackExecutor : public base::Executor {
 public:
  CallbackExecutor(base::Executor* target, absl::string_view what) : target_(target), what_(what) {}
  void Schedule(base::Task task) override {
    target_->Schedule(
        [what = what_, task = std::move(task)]() mutable { RunCallback(what, std::move(task)); });
  }

 private:
  base::Executor* const target_;
  const absl::string_view what_;  // A literal: tasks outlive this.
};

}  // namespace Atoll::rpc
