// One owner's shard of a model: serves the methods of messages.h.
//
//   rref / a test ── Handle ──> decode ──> serial executor ──> RoundCore decides ──> ChunkStore folds, applies
//                 <── reply ─────────────────────────────────────┘ (now, or when round and landing are there)
//
// Held by shared_ptr. Handle, Allocate and OnPeerGone may be called from any thread; all the rest runs on the
// shard's serial executor. Replies run there too, without a lock. Knows no network: ShardObject
// (shard_object.h) makes it a remote object.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/clock.h"
#include "atoll/base/executor.h"
#include "atoll/rpc/agent.h"
#include "atoll/shard_optim/chunk_store.h"
#include "atoll/shard_optim/messages.h"
#include "atoll/shard_optim/round_core.h"

namespace Atoll::shard_optim {

/// What a shard may hold beside its parameters and their state, in bytes.
struct ShardMemory {
  /// Of gradients that were received and are not applied. Beyond, only the next in rank order are taken.
  size_t staging_bytes = size_t{1} << 30;
  /// Of old values that readers still hold. Beyond, a chunk waits for a reader.
  size_t spare_bytes = size_t{256} << 20;
};

/// What a shard runs on; all outlive it.
struct ShardEnvironment {
  base::Executor* executor = nullptr;  ///< Passes and bookkeeping run here, one at a time.
  base::Timer* timer = nullptr;        ///< Null: no limit passes by itself (tests call TickForTest).
  const base::Clock* clock = nullptr;
  ShardMemory memory = {};
};

class Shard : public std::enable_shared_from_this<Shard> {
 public:
  using Reply = absl::AnyInvocable<void(absl::StatusOr<rpc::Payload>)>;

  /// InvalidArgument: arguments that fit no layout. ResourceExhausted: no memory for it.
  static absl::StatusOr<std::shared_ptr<Shard>> Create(ShardArguments arguments,
                                                       ShardEnvironment environment);
  /// Whoever still waits is answered with Unavailable.
  ~Shard();

  /// Serves one call. `reply` runs once, perhaps before this returns. `deadline` is when the caller gives up.
  void Handle(const base::MemberId& caller, const rpc::MethodId& method, rpc::Received request,
              absl::Time deadline, Reply reply);
  /// Where a request's tensors land: reused memory. An error refuses the call before any byte moves.
  absl::StatusOr<std::vector<at::Tensor>> Allocate(const base::MemberId& caller, const rpc::MethodId& method,
                                                   absl::string_view body,
                                                   absl::Span<const rpc::TensorMeta> metas);
  /// A member died or left: rounds go on without it.
  void OnPeerGone(const base::MemberId& member, const absl::Status& reason);

  const Layout& layout() const { return layout_; }
  /// Runs what is due at the clock's time.
  void TickForTest();
  const ChunkStore& StoreForTest() const { return *store_; }

 private:
  struct Waiter {  // A push that waits for its answer.
    int64_t step = 0;
    Reply reply;
    ChunkStore::Loan value;  // Sync: the step's value, kept until the landing.
  };
  struct Puller {
    base::MemberId caller;
    int64_t min_step = 0;
    absl::Time deadline;  // When the caller gives up.
    Reply reply;
  };
  struct ChunkState {
    int64_t version = 0;  // Sync: step of the value. Async: contributions applied.
    bool loaded = false;
    std::map<std::pair<int64_t, int>, Contribution> arrived;  // Not yet folded, by step and worker.
    std::map<int, Waiter> waiters;                            // By worker.
    std::vector<Puller> pullers;
    std::deque<Action> blocked;  // Waits for a spare to apply into; later actions queue behind.
  };
  struct AttachWaiter {
    base::MemberId member;
    Reply reply;
  };

  Shard(ShardArguments arguments, Layout layout, ShardEnvironment environment);
  template <class Request>
  bool Dispatch(const rpc::MethodId& method, const base::MemberId& caller, rpc::Received& request,
                absl::Time deadline, Reply& reply);

  // On the serial executor.
  void Serve(const base::MemberId& caller, Attach request, rpc::Received received, absl::Time deadline,
             Reply reply);
  void Serve(const base::MemberId& caller, Load request, rpc::Received received, absl::Time, Reply reply);
  void Serve(const base::MemberId& caller, Join request, rpc::Received received, absl::Time, Reply reply);
  void Serve(const base::MemberId& caller, Pull request, rpc::Received received, absl::Time deadline,
             Reply reply);
  void Serve(const base::MemberId& caller, PushGradient request, rpc::Received received, absl::Time,
             Reply reply);
  void Serve(const base::MemberId& caller, OpenLanding request, rpc::Received received, absl::Time,
             Reply reply);
  void Serve(const base::MemberId& caller, Leave request, rpc::Received received, absl::Time, Reply reply);
  void Serve(const base::MemberId& caller, Info request, rpc::Received received, absl::Time, Reply reply);
  /// Changes the part that an attached caller has in the rounds: `act(core, worker, actions)` decides, the
  /// actions are carried out, and then the message that it returned is the answer.
  template <class Act>
  void ServeMember(const base::MemberId& caller, Reply reply, Act act);
  absl::Status CheckPush(const PushGradient& push, const rpc::Received& received, int index) const;
  void KeepWaiter(int index, int worker, int64_t step, Reply reply);
  void Run(const std::vector<Action>& actions);
  void RunOrQueue(const Action& action);
  bool RunOnChunk(const Action& action);
  void AnswerAttach(int worker);
  void AnswerPush(const Action& action);
  void FinishApply(const Action& action);
  void ServePullers(int index);
  void DropLatePullers(int index);
  void SendValue(Reply& reply, std::string body, ChunkStore::Loan loan);
  void DropWorker(int worker);
  void RetryBlocked();
  void OnLoanEnd();
  void AttachLimitPassed(const base::MemberId& member);
  void Tick();
  void SetTimer();

  template <class Message>
  static rpc::Payload Body(const Message& message) {
    rpc::Payload payload;
    payload.body = message.Encode();
    return payload;
  }
  static absl::Status NotAttached(const base::MemberId& caller);
  absl::Status Compare(const ShardArguments& theirs) const;
  /// Index among our chunks, or InvalidArgument that names whose chunk it is.
  absl::StatusOr<int> LocalChunk(int32_t chunk) const;
  bool is_sync() const { return std::holds_alternative<Sync>(arguments_.policy); }

  const ShardArguments arguments_;
  const Layout layout_;
  const OwnerRange range_;
  const ShardEnvironment environment_;
  const std::shared_ptr<base::SerialExecutor> serial_;
  const std::shared_ptr<BufferPool> staging_;

  mutable absl::Mutex mu_;
  RoundCore core_ ABSL_GUARDED_BY(mu_);  // Written on the serial executor only; Allocate reads it.

  // On the serial executor.
  std::unique_ptr<ChunkStore> store_;
  std::vector<ChunkState> chunks_;
  std::map<int, AttachWaiter> attach_waiters_;
  std::string last_failure_;                        // Of a member that went: perhaps why one is missing.
  std::map<int64_t, AdamOptions> round_optimizer_;  // Sync: of the open rounds, for texts.
  int chunks_to_load_ = 0;
  absl::Time timer_at_ = absl::InfiniteFuture();
  base::Timer::Id timer_id_ = 0;
  std::atomic<int> blocked_chunks_{0};
};

}  // namespace Atoll::shard_optim
