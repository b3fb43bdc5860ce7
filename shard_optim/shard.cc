#include "atoll/shard_optim/shard.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/status.h"

namespace Atoll::shard_optim {
namespace {

RoundOptions MakeRoundOptions(const ShardArguments& arguments, const Layout& layout, size_t staging_bytes) {
  const OwnerRange& range = layout.owners()[arguments.owner];
  RoundOptions options;
  const Sync* sync = std::get_if<Sync>(&arguments.policy);
  options.sync = sync != nullptr;
  if (sync != nullptr) options.round_limit = sync->round_limit;
  options.worker_count = arguments.worker_count;
  options.chunks = range.chunk_count;
  options.first_chunk = range.first_chunk;
  size_t chunk_bytes =
      std::max<size_t>(4096, static_cast<size_t>(layout.max_chunk_elements()) * sizeof(float));
  options.max_parked = static_cast<int64_t>(staging_bytes / chunk_bytes);
  return options;
}

std::string PolicyText(const Policy& policy) {
  const Sync* sync = std::get_if<Sync>(&policy);
  return sync == nullptr ? "async"
                         : absl::StrCat("sync, round limit ", absl::FormatDuration(sync->round_limit));
}

// Elements of a tensor that a peer announced; -1 beyond what any chunk has.
int64_t Elements(const rpc::TensorMeta& meta) {
  int64_t elements = 1;
  for (int64_t size : meta.sizes) {
    if (size < 0 || size > (int64_t{1} << 30)) return -1;
    elements *= size;
    if (elements > (int64_t{1} << 30)) return -1;
  }
  return elements;
}

}  // namespace

absl::Status Shard::NotAttached(const base::MemberId& caller) {
  return absl::FailedPreconditionError(absl::StrCat(caller.ToString(), " is not attached: attach first"));
}

absl::StatusOr<std::shared_ptr<Shard>> Shard::Create(ShardArguments arguments, ShardEnvironment environment) {
  ATOLL_ASSIGN_OR_RETURN(Layout layout, Layout::Create(arguments.parameters, arguments.layout));
  if (arguments.owner < 0 || arguments.owner >= arguments.layout.owners) {
    return absl::InvalidArgumentError(
        absl::StrCat("owner ", arguments.owner, " of ", arguments.layout.owners, " owners"));
  }
  std::shared_ptr<Shard> shard(new Shard(std::move(arguments), std::move(layout), environment));
  std::weak_ptr<Shard> weak = shard;
  ATOLL_ASSIGN_OR_RETURN(shard->store_, ChunkStore::Create(&shard->layout_, shard->arguments_.owner,
                                                           environment.memory.spare_bytes, [weak] {
                                                             if (std::shared_ptr<Shard> alive = weak.lock())
                                                               alive->OnLoanEnd();
                                                           }));
  return shard;
}

Shard::Shard(ShardArguments arguments, Layout layout, ShardEnvironment environment)
    : arguments_(std::move(arguments)),
      layout_(std::move(layout)),
      range_(layout_.owners()[arguments_.owner]),
      environment_(environment),
      serial_(base::SerialExecutor::Create(environment.executor)),
      staging_(BufferPool::Create(environment.memory.staging_bytes)),
      core_(MakeRoundOptions(arguments_, layout_, environment.memory.staging_bytes)),
      chunks_(range_.chunk_count),
      chunks_to_load_(range_.chunk_count) {}

Shard::~Shard() {
  if (timer_id_ != 0) environment_.timer->Cancel(timer_id_);
  absl::Status status = absl::UnavailableError(absl::StrCat("the shard of '", arguments_.model, "' is gone"));
  for (auto& [worker, waiter] : attach_waiters_) waiter.reply(status);
  for (ChunkState& chunk : chunks_) {
    for (auto& [worker, waiter] : chunk.waiters) waiter.reply(status);
    for (Puller& puller : chunk.pullers) puller.reply(status);
  }
}

// ---- From the wire --------------------------------------------------------------------------------------

template <class Request>
bool Shard::Dispatch(const rpc::MethodId& method, const base::MemberId& caller, rpc::Received& request,
                     absl::Time deadline, Reply& reply) {
  if (method != Request::Method()) return false;
  absl::StatusOr<Request> decoded = Request::Decode(request.body);
  if (!decoded.ok()) {
    reply(decoded.status());
    return true;
  }
  serial_->Schedule([self = shared_from_this(), caller, decoded = *std::move(decoded),
                     request = std::move(request), deadline, reply = std::move(reply)]() mutable {
    self->Serve(caller, std::move(decoded), std::move(request), deadline, std::move(reply));
    self->SetTimer();
  });
  return true;
}

void Shard::Handle(const base::MemberId& caller, const rpc::MethodId& method, rpc::Received request,
                   absl::Time deadline, Reply reply) {
  bool known = Dispatch<PushGradient>(method, caller, request, deadline, reply) ||
               Dispatch<OpenLanding>(method, caller, request, deadline, reply) ||
               Dispatch<Pull>(method, caller, request, deadline, reply) ||
               Dispatch<Attach>(method, caller, request, deadline, reply) ||
               Dispatch<Load>(method, caller, request, deadline, reply) ||
               Dispatch<Join>(method, caller, request, deadline, reply) ||
               Dispatch<Leave>(method, caller, request, deadline, reply) ||
               Dispatch<Info>(method, caller, request, deadline, reply);
  if (known) return;
  reply(absl::NotFoundError(
      absl::StrCat(kShardClass, " has no method '", method.name, "' of version ", method.version,
                   "; it has attach, load, join, pull, push_gradient, open_landing, leave "
                   "and info, each of version 1")));
}

absl::StatusOr<std::vector<at::Tensor>> Shard::Allocate(const base::MemberId& caller,
                                                        const rpc::MethodId& method, absl::string_view body,
                                                        absl::Span<const rpc::TensorMeta> metas) {
  if (metas.empty()) return std::vector<at::Tensor>();
  const bool push = method == PushGradient::Method();
  if (!push && method != Load::Method()) {
    return absl::InvalidArgumentError(absl::StrCat("'", method.name, "' takes no tensors"));
  }
  int32_t chunk = 0;
  int64_t step = 0;
  if (push) {
    ATOLL_ASSIGN_OR_RETURN(PushGradient request, PushGradient::Decode(body));
    chunk = request.chunk;
    step = request.step;
  } else {
    ATOLL_ASSIGN_OR_RETURN(Load request, Load::Decode(body));
    chunk = request.chunk;
  }
  ATOLL_ASSIGN_OR_RETURN(int index, LocalChunk(chunk));
  const int64_t elements = store_->chunk(index).elements();
  if (metas.size() != 1 || metas[0].dtype != at::kFloat || Elements(metas[0]) != elements) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", chunk, " travels as one float tensor of ", elements, " elements"));
  }
  // The next in rank order is taken whatever is parked, else nothing could ever be applied. Loads come once.
  size_t extra_bytes = 0;
  {
    absl::MutexLock lock(&mu_);
    int worker = core_.WorkerOf(caller);
    if (worker < 0) return NotAttached(caller);
    if (!push || core_.IsNextInOrder(worker, step, index)) {
      extra_bytes = 4 * static_cast<size_t>(range_.flat_end - range_.flat_begin) * sizeof(float) + (1 << 20);
    }
  }
  ATOLL_ASSIGN_OR_RETURN(at::Tensor tensor, staging_->Take(elements, extra_bytes));
  return std::vector<at::Tensor>{std::move(tensor)};
}

void Shard::OnPeerGone(const base::MemberId& member, const absl::Status& reason) {
  serial_->Schedule([self = shared_from_this(), member, reason] {
    std::vector<Action> actions;
    {
      absl::MutexLock lock(&self->mu_);
      self->core_.Gone(member, &actions);
    }
    if (!reason.ok()) self->last_failure_ = absl::StrCat(member.name, ": ", reason.message());
    for (ChunkState& chunk : self->chunks_) {
      auto gone = std::stable_partition(chunk.pullers.begin(), chunk.pullers.end(),
                                        [&](const Puller& puller) { return puller.caller != member; });
      std::vector<Puller> dropped(std::make_move_iterator(gone),
                                  std::make_move_iterator(chunk.pullers.end()));
      chunk.pullers.erase(gone, chunk.pullers.end());
      for (Puller& puller : dropped) puller.reply(absl::UnavailableError("the caller is gone"));
    }
    self->Run(actions);
    self->SetTimer();
  });
}

absl::StatusOr<int> Shard::LocalChunk(int32_t chunk) const {
  int index = chunk - range_.first_chunk;
  if (chunk >= 0 && index >= 0 && index < range_.chunk_count) return index;
  std::string whose = chunk < 0 || chunk >= static_cast<int32_t>(layout_.chunks().size())
                          ? absl::StrCat("there are ", layout_.chunks().size())
                          : absl::StrCat("it is owner ", layout_.chunks()[chunk].owner, "'s");
  return absl::InvalidArgumentError(
      absl::StrCat("chunk ", chunk, " is not of owner ", arguments_.owner, ": ", whose));
}

// ---- Workers come and go --------------------------------------------------------------------------------

absl::Status Shard::Compare(const ShardArguments& theirs) const {
  std::string difference = FirstDifference(arguments_.parameters, theirs.parameters);
  auto differ = [&difference](absl::string_view what, auto ours, auto theirs) {
    if (difference.empty() && ours != theirs)
      difference = absl::StrCat(what, " ", ours, " here, ", theirs, " there");
  };
  differ("model", arguments_.model, theirs.model);
  differ("owner index", arguments_.owner, theirs.owner);
  differ("owner count", arguments_.layout.owners, theirs.layout.owners);
  differ("worker count", arguments_.worker_count, theirs.worker_count);
  differ("chunk_bytes", arguments_.layout.chunk_bytes, theirs.layout.chunk_bytes);
  differ("small_parameter_bytes", arguments_.layout.small_parameter_bytes,
         theirs.layout.small_parameter_bytes);
  differ("policy", PolicyText(arguments_.policy), PolicyText(theirs.policy));
  if (difference.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the worker's model '", theirs.model, "' (there) is not the one of this shard (here): ", difference));
}

void Shard::Serve(const base::MemberId& caller, Attach request, rpc::Received received, absl::Time deadline,
                  Reply reply) {
  absl::Status status = Compare(request.arguments);
  if (!status.ok()) return reply(status);
  std::vector<Action> actions;
  bool waits = false;
  {
    absl::MutexLock lock(&mu_);
    status = core_.Attach(request.worker, caller, &actions);
    waits = !core_.NotYetAttached().empty();
  }
  if (!status.ok()) {
    Run(actions);
    return reply(status);
  }
  // A replaced incarnation's leavings go first; then its successor waits in its place.
  std::vector<Action> drops, rest;
  for (Action& action : actions)
    (action.kind == Action::Kind::kAttached ? rest : drops).push_back(std::move(action));
  Run(drops);
  AttachWaiter& waiter = attach_waiters_[request.worker];
  if (waiter.reply) waiter.reply(absl::AbortedError("attached again by a later call"));
  waiter = {caller, std::move(reply)};
  if (waits && environment_.timer != nullptr && deadline != absl::InfiniteFuture()) {
    // A little before the caller gives up, so that it hears who is missing.
    absl::Duration margin = std::min(absl::Seconds(1), (deadline - environment_.clock->Now()) / 4);
    environment_.timer->At(deadline - margin, [weak = weak_from_this(), caller] {
      std::shared_ptr<Shard> self = weak.lock();
      if (self == nullptr) return;
      base::SerialExecutor* serial = self->serial_.get();
      serial->Schedule([self = std::move(self), caller] { self->AttachLimitPassed(caller); });
    });
  }
  Run(rest);
}

void Shard::AttachLimitPassed(const base::MemberId& member) {
  std::vector<int> missing;
  {
    absl::MutexLock lock(&mu_);
    missing = core_.NotYetAttached();
  }
  for (auto& [worker, waiter] : attach_waiters_) {
    if (waiter.member != member) continue;
    Reply reply = std::move(waiter.reply);
    attach_waiters_.erase(worker);
    return reply(absl::DeadlineExceededError(absl::StrCat(
        "not all of ", arguments_.worker_count, " workers have attached to '", arguments_.model,
        "': missing worker ", absl::StrJoin(missing, ", worker "),
        last_failure_.empty() ? "" : absl::StrCat("; the last that failed is ", last_failure_))));
  }
}

void Shard::AnswerAttach(int worker) {
  auto found = attach_waiters_.find(worker);
  if (found == attach_waiters_.end()) return;
  Attach::Reply answer;
  {
    absl::MutexLock lock(&mu_);
    answer.next_step = core_.NextStep(worker);
    answer.joined = core_.IsJoined(worker);
  }
  answer.load = worker == 0 && chunks_to_load_ > 0;
  Reply reply = std::move(found->second.reply);
  attach_waiters_.erase(found);
  reply(Body(answer));
}

template <class Act>
void Shard::ServeMember(const base::MemberId& caller, Reply reply, Act act) {
  std::vector<Action> actions;
  absl::StatusOr<rpc::Payload> answer = NotAttached(caller);
  {
    absl::MutexLock lock(&mu_);
    const int worker = core_.WorkerOf(caller);
    if (worker >= 0) answer = Body(act(core_, worker, &actions));
  }
  Run(actions);
  reply(std::move(answer));
}

void Shard::Serve(const base::MemberId& caller, Join request, rpc::Received received, absl::Time,
                  Reply reply) {
  ServeMember(caller, std::move(reply), [&](RoundCore& core, int worker, std::vector<Action>* actions) {
    Join::Reply answer;
    answer.accepted = core.Join(worker, request.from_step, actions);
    answer.next_step = core.NextStep(worker);
    return answer;
  });
}

void Shard::Serve(const base::MemberId& caller, Leave request, rpc::Received received, absl::Time,
                  Reply reply) {
  ServeMember(caller, std::move(reply), [&](RoundCore& core, int worker, std::vector<Action>* actions) {
    core.Leave(worker, request.after_step, actions);
    return Empty();
  });
}

void Shard::Serve(const base::MemberId& caller, OpenLanding request, rpc::Received received, absl::Time,
                  Reply reply) {
  ServeMember(caller, std::move(reply), [&](RoundCore& core, int worker, std::vector<Action>* actions) {
    core.OpenLanding(worker, request.step, actions);
    return Empty();
  });
}

void Shard::DropWorker(int worker) {
  absl::Status status = absl::UnavailableError("the caller is gone");
  auto waiting = attach_waiters_.find(worker);
  if (waiting != attach_waiters_.end()) {
    Reply reply = std::move(waiting->second.reply);
    attach_waiters_.erase(waiting);
    reply(status);
  }
  for (ChunkState& chunk : chunks_) {
    auto found = chunk.waiters.find(worker);
    if (found == chunk.waiters.end()) continue;
    Waiter waiter = std::move(found->second);
    chunk.waiters.erase(found);
    waiter.reply(status);
  }
}

void Shard::Serve(const base::MemberId& caller, Info request, rpc::Received received, absl::Time,
                  Reply reply) {
  Info::Reply answer;
  answer.elements = range_.elements;
  answer.state_bytes = store_->state_bytes();
  answer.chunks = range_.chunk_count;
  answer.loaded = chunks_to_load_ == 0;
  {
    absl::MutexLock lock(&mu_);
    answer.steps = core_.steps();
    answer.workers = core_.members();
  }
  reply(Body(answer));
}

// ---- Time -----------------------------------------------------------------------------------------------

void Shard::Tick() {
  std::vector<Action> actions;
  {
    absl::MutexLock lock(&mu_);
    core_.Tick(environment_.clock->Now(), &actions);
  }
  Run(actions);
  SetTimer();
}

void Shard::TickForTest() {
  serial_->Schedule([self = shared_from_this()] { self->Tick(); });
}

void Shard::SetTimer() {
  if (environment_.timer == nullptr) return;
  absl::Time next;
  {
    absl::MutexLock lock(&mu_);
    next = core_.NextDeadline();
  }
  if (next == timer_at_) return;
  if (timer_id_ != 0) environment_.timer->Cancel(timer_id_);
  timer_id_ = 0;
  timer_at_ = next;
  if (next == absl::InfiniteFuture()) return;
  timer_id_ = environment_.timer->At(next, [weak = weak_from_this()] {
    std::shared_ptr<Shard> self = weak.lock();
    if (self == nullptr) return;
    base::SerialExecutor* serial = self->serial_.get();
    serial->Schedule([self = std::move(self)] {
      self->timer_at_ = absl::InfiniteFuture();
      self->timer_id_ = 0;
      self->Tick();
    });
  });
}

}  // namespace Atoll::shard_optim
