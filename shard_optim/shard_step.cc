// What a shard does in a step: values in and out, gradients in, and the actions of the core.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "atoll/shard_optim/shard.h"

namespace Atoll::shard_optim {
namespace {

constexpr size_t kMaxPullersOfChunk = 4096;

uint64_t HyperDigest(const AdamOptions& options) {
  uint64_t digest = 0xcbf29ce484222325;
  for (double value : {options.lr, options.beta1, options.beta2, options.eps, options.weight_decay}) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    digest = (digest ^ bits) * 0x100000001b3;
    digest ^= digest >> 29;
  }
  return digest;
}

std::string HyperText(const AdamOptions& o) {
  return absl::StrFormat("lr=%.17g betas=(%.17g, %.17g) eps=%.17g weight_decay=%.17g", o.lr, o.beta1, o.beta2,
                         o.eps, o.weight_decay);
}

}  // namespace

// ---- Values ---------------------------------------------------------------------------------------------

void Shard::Serve(const base::MemberId& caller, Load request, rpc::Received received, absl::Time,
                  Reply reply) {
  int worker = -1;
  {
    absl::MutexLock lock(&mu_);
    worker = core_.WorkerOf(caller);
  }
  if (worker < 0) return reply(NotAttached(caller));
  if (worker != 0) {
    return reply(absl::FailedPreconditionError(
        absl::StrCat("the initial values are worker 0's; ", caller.ToString(), " is worker ", worker)));
  }
  absl::StatusOr<int> index = LocalChunk(request.chunk);
  if (!index.ok()) return reply(index.status());
  if (chunks_to_load_ == 0) {
    return reply(absl::AlreadyExistsError(absl::StrCat("owner ", arguments_.owner, " has the values of '",
                                                       arguments_.model, "' already: pull them")));
  }
  const int64_t elements = store_->chunk(*index).elements();
  if (received.tensors.size() != 1 || received.tensors[0].scalar_type() != at::kFloat ||
      received.tensors[0].numel() != elements || !received.tensors[0].is_contiguous()) {
    return reply(absl::InvalidArgumentError(
        absl::StrCat("chunk ", request.chunk, " travels as one float tensor of ", elements, " elements")));
  }
  store_->Load(*index, received.tensors[0]);
  received.tensors.clear();  // Staging is free for the next before the caller hears.
  ChunkState& chunk = chunks_[*index];
  if (!chunk.loaded) --chunks_to_load_;
  chunk.loaded = true;
  reply(Body(Empty()));
  for (int i = 0; chunks_to_load_ == 0 && i < range_.chunk_count; ++i) ServePullers(i);
}

void Shard::Serve(const base::MemberId& caller, Pull request, rpc::Received received, absl::Time deadline,
                  Reply reply) {
  absl::StatusOr<int> index = LocalChunk(request.chunk);
  if (!index.ok()) return reply(index.status());
  ChunkState& chunk = chunks_[*index];
  if (chunk.pullers.size() >= kMaxPullersOfChunk) DropLatePullers(*index);
  if (chunk.pullers.size() >= kMaxPullersOfChunk) {
    return reply(absl::ResourceExhaustedError(
        absl::StrCat(kMaxPullersOfChunk, " pulls of chunk ", request.chunk, " wait already")));
  }
  chunk.pullers.push_back({caller, is_sync() ? request.min_step : 0, deadline, std::move(reply)});
  ServePullers(*index);
}

void Shard::DropLatePullers(int index) {
  const absl::Time now = environment_.clock->Now();
  std::vector<Puller> late, waiting;
  for (Puller& puller : chunks_[index].pullers) {
    (puller.deadline <= now ? late : waiting).push_back(std::move(puller));
  }
  chunks_[index].pullers = std::move(waiting);
  for (Puller& puller : late) puller.reply(absl::DeadlineExceededError("the caller gave up"));
}

void Shard::ServePullers(int index) {
  ChunkState& chunk = chunks_[index];
  if (chunks_to_load_ > 0 || chunk.pullers.empty()) return;
  std::vector<Puller> ready, waiting;
  for (Puller& puller : chunk.pullers) {
    (puller.min_step <= chunk.version ? ready : waiting).push_back(std::move(puller));
  }
  chunk.pullers = std::move(waiting);
  for (Puller& puller : ready) {
    Pull::Reply answer;
    answer.step = chunk.version;
    SendValue(puller.reply, answer.Encode(), store_->Lend(index));
  }
}

void Shard::SendValue(Reply& reply, std::string body, ChunkStore::Loan loan) {
  rpc::Payload payload;
  payload.body = std::move(body);
  rpc::OutTensor out;
  out.tensor = loan.tensor();
  out.lent = true;
  out.on_return = [loan = std::move(loan)]() mutable { loan = ChunkStore::Loan(); };
  payload.tensors.push_back(std::move(out));
  reply(std::move(payload));
}

// ---- Gradients ------------------------------------------------------------------------------------------

absl::Status Shard::CheckPush(const PushGradient& push, const rpc::Received& received, int index) const {
  const Chunk& chunk = store_->chunk(index);
  const std::string all = AllDefined(chunk.segments.size());
  bool any = false, stray = push.defined.size() != all.size();
  for (size_t i = 0; i < push.defined.size() && !stray; ++i) {
    any |= push.defined[i] != 0;
    stray = (push.defined[i] & ~all[i]) != 0;
  }
  if (stray) {
    return absl::InvalidArgumentError(absl::StrCat("the bitmap of chunk ", push.chunk,
                                                   " has one bit for each of its ", chunk.segments.size(),
                                                   " segments, and no other"));
  }
  const size_t tensors = received.tensors.size();
  if (tensors > 1 || (any && tensors == 0) ||
      (tensors == 1 &&
       (received.tensors[0].scalar_type() != at::kFloat || received.tensors[0].numel() != chunk.elements() ||
        !received.tensors[0].is_contiguous()))) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", push.chunk, " travels as one float tensor of ",
                                                   chunk.elements(),
                                                   " elements (or none if none is defined)"));
  }
  if (chunks_to_load_ > 0) {
    return absl::FailedPreconditionError(absl::StrCat("owner ", arguments_.owner,
                                                      " still misses the values of ", chunks_to_load_,
                                                      " chunks: pull before the first push"));
  }
  if (chunks_[index].blocked.size() > 64 + 8 * static_cast<size_t>(arguments_.worker_count)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("chunk ", push.chunk, " waits for readers that hold its old values: push again later"));
  }
  return Validate(push.optimizer);
}

void Shard::Serve(const base::MemberId& caller, PushGradient request, rpc::Received received, absl::Time,
                  Reply reply) {
  absl::StatusOr<int> index = LocalChunk(request.chunk);
  absl::Status status = index.ok() ? CheckPush(request, received, *index) : index.status();
  if (!status.ok()) return reply(status);
  int worker = -1;
  Verdict verdict;
  {
    absl::MutexLock lock(&mu_);
    worker = core_.WorkerOf(caller);
    if (worker >= 0) {
      verdict = core_.Contribute(worker, request.step, *index, HyperDigest(request.optimizer),
                                 environment_.clock->Now());
    }
  }
  if (worker < 0) return reply(NotAttached(caller));
  if (verdict.kind == Verdict::Kind::kRefused) {
    if (verdict.disagrees) {
      verdict.status = absl::InvalidArgumentError(absl::StrCat(verdict.status.message(), ": ",
                                                               HyperText(round_optimizer_[request.step]),
                                                               " against ", HyperText(request.optimizer)));
    }
    return reply(verdict.status);
  }
  if (verdict.kind == Verdict::Kind::kTaken) {
    if (is_sync()) round_optimizer_[request.step] = request.optimizer;
    while (round_optimizer_.size() > 3) round_optimizer_.erase(round_optimizer_.begin());
    Contribution contribution;
    if (!received.tensors.empty()) contribution.gradient = std::move(received.tensors[0]);
    contribution.defined = std::move(request.defined);
    contribution.optimizer = request.optimizer;
    chunks_[*index].arrived[{request.step, worker}] = std::move(contribution);
  }
  received.tensors.clear();
  KeepWaiter(*index, worker, request.step, std::move(reply));
  Run(verdict.actions);
}

// The latest call of a worker for a chunk gets the answer; one that waited before is told so.
void Shard::KeepWaiter(int index, int worker, int64_t step, Reply reply) {
  ChunkState& chunk = chunks_[index];
  Waiter& waiter = chunk.waiters[worker];
  Reply earlier = std::move(waiter.reply);
  ChunkStore::Loan value;
  // A repeat of the step whose value waits for the landing: the value kept for it serves the repeat.
  if (waiter.step == step) value = std::move(waiter.value);
  waiter = Waiter{step, std::move(reply), std::move(value)};
  if (earlier) {
    earlier(absl::AbortedError(absl::StrCat("a later push of chunk ", range_.first_chunk + index,
                                            " by this worker gets the answer")));
  }
}

// ---- Actions of the core --------------------------------------------------------------------------------

void Shard::Run(const std::vector<Action>& actions) {
  for (const Action& action : actions) RunOrQueue(action);
}

void Shard::RunOrQueue(const Action& action) {
  if (action.kind == Action::Kind::kAttached) return AnswerAttach(action.worker);
  if (action.kind == Action::Kind::kDrop) return DropWorker(action.worker);
  ChunkState& chunk = chunks_[action.chunk];
  if (!chunk.blocked.empty()) {
    chunk.blocked.push_back(action);
    return;
  }
  if (RunOnChunk(action)) return;
  chunk.blocked.push_back(action);
  blocked_chunks_.fetch_add(1);
  // A loan that ended just before we counted ourselves told nobody.
  serial_->Schedule([self = shared_from_this()] { self->RetryBlocked(); });
}

// False: there is no spare to apply into now.
bool Shard::RunOnChunk(const Action& action) {
  ChunkState& chunk = chunks_[action.chunk];
  switch (action.kind) {
    case Action::Kind::kFold: {
      auto found = chunk.arrived.find({action.step, action.worker});
      store_->Fold(action.chunk, std::move(found->second));
      chunk.arrived.erase(found);
      return true;
    }
    case Action::Kind::kApply:
      if (!store_->Apply(action.chunk, action.contributors)) return false;
      FinishApply(action);
      return true;
    case Action::Kind::kSkip:
      FinishApply(action);
      return true;
    case Action::Kind::kReply:
      AnswerPush(action);
      return true;
    case Action::Kind::kRefuse: {
      auto found = chunk.waiters.find(action.worker);
      if (found == chunk.waiters.end() || found->second.step != action.step) return true;
      Waiter waiter = std::move(found->second);
      chunk.waiters.erase(found);
      waiter.reply(action.status);
      return true;
    }
    case Action::Kind::kDiscard:
      store_->Discard(action.chunk);
      chunk.arrived.erase(chunk.arrived.lower_bound({action.step, 0}),
                          chunk.arrived.lower_bound({action.step + 1, 0}));
      return true;
    case Action::Kind::kAttached:
    case Action::Kind::kDrop:
      return true;  // Of no chunk; RunOrQueue has them.
  }
  return true;
}

void Shard::FinishApply(const Action& action) {
  ChunkState& chunk = chunks_[action.chunk];
  chunk.version = is_sync() ? action.step : chunk.version + 1;
  for (auto& [worker, waiter] : chunk.waiters) {
    if (is_sync() && waiter.step == action.step) waiter.value = store_->Lend(action.chunk);
  }
  ServePullers(action.chunk);
}

void Shard::AnswerPush(const Action& action) {
  ChunkState& chunk = chunks_[action.chunk];
  auto found = chunk.waiters.find(action.worker);
  if (found == chunk.waiters.end() || found->second.step != action.step) return;  // Its caller is gone.
  Waiter waiter = std::move(found->second);
  chunk.waiters.erase(found);
  PushGradient::Reply answer;
  answer.step = is_sync() ? action.step : chunk.version;
  answer.contributors = action.contributors;
  if (!waiter.value) waiter.value = store_->Lend(action.chunk);
  SendValue(waiter.reply, answer.Encode(), std::move(waiter.value));
}

void Shard::OnLoanEnd() {
  if (blocked_chunks_.load() == 0) return;
  serial_->Schedule([self = shared_from_this()] {
    self->RetryBlocked();
    self->SetTimer();
  });
}

void Shard::RetryBlocked() {
  for (ChunkState& chunk : chunks_) {
    if (chunk.blocked.empty()) continue;
    while (!chunk.blocked.empty()) {
      Action action = chunk.blocked.front();
      if (!RunOnChunk(action)) break;
      chunk.blocked.pop_front();
    }
    if (chunk.blocked.empty()) blocked_chunks_.fetch_sub(1);
  }
}

}  // namespace Atoll::shard_optim
