// Calls of one method, gathered and handled together: a model evaluates eight observations at the cost of one, a
// server steps once for all its trainers. A call that waits in a batch holds no thread and no window.
//
//   auto batcher = Batcher::Create(&agent, {.size = 8}, [](std::vector<ServerCall> calls) { ... });
//   agent.Register({"policy.act"}, (*batcher)->handler());
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

/// Thread-safe. Held by its handler too: what is registered with an agent lives as long as that.
class Batcher : public std::enable_shared_from_this<Batcher> {
 public:
  struct Options {
    int size = 16;  ///< A batch is handed on when so many calls are there (1 to 1,048,576),
    /// or so long after its first one (more than zero; InfiniteDuration: only whole batches).
    absl::Duration delay = absl::Milliseconds(5);
  };
  /// Answers each of `calls`, now or later: 1 to `size`, in the order in which they came, without those whose
  /// callers gave up by then. Runs on a thread of the agent's pool; several batches may be handled at once.
  /// What it throws is the answer of all that it has not answered.
  using BatchHandler = std::function<void(std::vector<ServerCall> calls)>;

  /// `agent` must outlive the calls of the handler. InvalidArgument for options out of range.
  static absl::StatusOr<std::shared_ptr<Batcher>> Create(Agent* agent, Options options, BatchHandler handler);
  ~Batcher();

  /// For Agent::Register.
  Handler handler();
  /// Hands on what waits, without waiting for more.
  void Flush();
  /// From now on calls, those that wait too, are answered with Aborted and `why`. Idempotent.
  void Stop(absl::string_view why);
  /// How many wait.
  size_t waiting() const;

 private:
  Batcher(Agent* agent, Options options, BatchHandler handler);
  void Add(ServerCall call);
  void Handle(std::vector<ServerCall> calls) const;
  void HandOn(uint64_t batch);  // If it waits still.
  std::vector<ServerCall> TakeLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Agent* const agent_;
  const Options options_;
  const BatchHandler handler_;
  mutable absl::Mutex mu_;
  std::vector<ServerCall> waiting_ ABSL_GUARDED_BY(mu_);
  uint64_t batch_ ABSL_GUARDED_BY(mu_) = 0;  // Counts them, so that a timer knows its own.
  base::Timer::Id timer_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status stopped_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::rpc
