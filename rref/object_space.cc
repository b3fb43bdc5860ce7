#include <utility>

#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rref/space.h"
#include "atoll/rref/wire.h"

namespace Atoll::rref {
namespace {

// Of the buffers that requests to objects landed in, this much is kept for use again.
constexpr size_t kKeepBufferBytes = size_t{64} << 20;

absl::Status ClosedError() { return absl::FailedPreconditionError("the object space is shut down"); }

// Calls of other processes get Unavailable: this one is on its way out.
absl::Status ClosingError() { return absl::UnavailableError("this process is shutting down"); }

absl::Status NoObject(const base::ObjectId& id) {
  return absl::NotFoundError(absl::StrCat("no object ", id.ToString(), " is held here"));
}

void Answer(rpc::Responder responder, const absl::StatusOr<base::ObjectId>& id) {
  if (id.ok()) {
    rpc::Payload reply;
    reply.body = Encode(*id);
    std::move(responder).Reply(std::move(reply));
  } else {
    std::move(responder).Reply(id.status());
  }
}

absl::StatusOr<std::shared_ptr<Object>> RunFactory(const Factory& factory, const base::MemberId& creator,
                                                   rpc::Received arguments) {
  try {
    auto object = factory(creator, std::move(arguments));
    if (object.ok() && *object == nullptr) return absl::InternalError("the factory made nothing");
    return object;
  } catch (...) {  // LibTorch's, most likely, thrown through the factory.
    return absl::InternalError(absl::StrCat("the factory threw ", rpc::ExceptionText()));
  }
}

}  // namespace

absl::StatusOr<std::vector<at::Tensor>> Object::Allocate(const base::MemberId& caller,
                                                         const rpc::MethodId& method, absl::string_view body,
                                                         absl::Span<const rpc::TensorMeta> metas) {
  return std::vector<at::Tensor>();
}

Space::Space(rpc::Agent* agent)
    : agent_(agent),
      events_(base::SerialExecutor::Create(agent->pool())),
      buffers_(rpc::BufferPool::Create(kKeepBufferBytes)),
      core_(agent->self().incarnation) {}

absl::Status Space::Serve() {
  // The agent keeps the handlers until its end: they hold us weakly.
  auto handler = [weak = weak_from_this()](void (Space::*handle)(rpc::ServerCall)) {
    return [weak, handle](rpc::ServerCall call) {
      auto space = weak.lock();
      if (space == nullptr) return std::move(call.responder).Reply(ClosingError());
      (space.get()->*handle)(std::move(call));
    };
  };
  ATOLL_RETURN_IF_ERROR(agent_->Register(CreateMethod(), handler(&Space::HandleCreate)));
  ATOLL_RETURN_IF_ERROR(agent_->Register(FindMethod(), handler(&Space::HandleFind)));
  ATOLL_RETURN_IF_ERROR(agent_->Register(ReleaseMethod(), handler(&Space::HandleRelease)));
  rpc::MethodOptions options;
  options.allocate = [weak = weak_from_this()](
                         const base::MemberId& caller, absl::string_view body,
                         absl::Span<const rpc::TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
    auto space = weak.lock();
    if (space == nullptr) return ClosingError();
    return space->AllocateForCall(caller, body, metas);
  };
  return agent_->Register(CallMethod(), handler(&Space::HandleCall), std::move(options));
}

void Space::Close() {
  absl::flat_hash_map<base::ObjectId, Held> objects;
  absl::flat_hash_map<base::ForkId, rpc::Responder> waiting;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
    objects.swap(objects_);
    waiting.swap(waiting_);
    classes_.clear();
    auto unused = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return uses_ == 0; };
    mu_.Await(absl::Condition(&unused));
  }
  for (auto& [fork, responder] : waiting) std::move(responder).Reply(ClosingError());
}

absl::Status Space::RegisterClass(std::string class_name, Factory factory) {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("ObjectSpace::RegisterClass"));
  ATOLL_RETURN_IF_ERROR(CheckClassName(class_name));
  absl::MutexLock lock(&mu_);
  if (closed_) return ClosedError();
  if (!classes_.emplace(class_name, std::make_shared<const Factory>(std::move(factory))).second) {
    return absl::AlreadyExistsError(absl::StrCat("class '", class_name, "' is registered"));
  }
  return absl::OkStatus();
}

base::ForkId Space::NewFork() {
  if (fork_mark_.in_child()) return {};  // Never sent: agent() refuses.
  absl::MutexLock lock(&mu_);
  return base::ForkId{agent_->self().incarnation, next_fork_++};
}

absl::StatusOr<Space::AgentUse> Space::UseAgent() const {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("ObjectSpace"));
  absl::MutexLock lock(&mu_);
  if (closed_) return base::WithRan(ClosedError(), base::Ran::kNo);
  ++uses_;
  return AgentUse(agent_, EndUse{shared_from_this()});
}

void Space::EndUse::operator()(rpc::Agent*) const {
  absl::MutexLock lock(&space->mu_);
  --space->uses_;
}

absl::Status Space::CheckOwner(const base::MemberId& owner) const {
  absl::MutexLock lock(&mu_);
  const absl::Status* why = gone_.Find(owner);
  if (why == nullptr) return absl::OkStatus();
  return base::WithRan(absl::UnavailableError(absl::StrCat("the object's owner ", owner.ToString(),
                                                           " is gone: ", why->message())),
                       base::Ran::kNo);
}

absl::Status Space::CheckCallerLocked(const base::ForkId& fork, const base::MemberId& caller) const {
  if (closed_) return ClosingError();
  if (fork.creator != caller.incarnation) {
    return absl::InvalidArgumentError(
        absl::StrCat("reference ", fork.ToString(), " was not made by ", caller.ToString()));
  }
  return absl::OkStatus();
}

void Space::HandleCreate(rpc::ServerCall call) {
  auto request = DecodeCreate(call.request.body);
  if (!request.ok()) return std::move(call.responder).Reply(request.status());
  std::shared_ptr<const Factory> factory;
  absl::StatusOr<ForkCore::Begin> begin;
  {
    absl::MutexLock lock(&mu_);
    begin = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::StatusOr<ForkCore::Begin> {
      ATOLL_RETURN_IF_ERROR(CheckCallerLocked(request->fork, call.caller));
      auto found = classes_.find(request->class_name);
      if (found == classes_.end()) {
        return absl::NotFoundError(absl::StrCat("no class '", request->class_name, "' is registered on ",
                                                agent_->self().ToString()));
      }
      factory = found->second;
      return core_.BeginCreate(request->fork, call.caller, request->pinned_name);
    }();
    if (begin.ok() && begin->kind != ForkCore::Begin::Kind::kHave) {
      waiting_.emplace(request->fork, std::move(call.responder));
      if (begin->kind == ForkCore::Begin::Kind::kMake) {
        objects_.emplace(begin->id, Held{request->class_name, nullptr});
      }
    }
  }
  if (!begin.ok()) return std::move(call.responder).Reply(begin.status());
  switch (begin->kind) {
    case ForkCore::Begin::Kind::kHave:
      return Answer(std::move(call.responder), begin->id);
    case ForkCore::Begin::Kind::kWait:
      return;  // Make answers.
    case ForkCore::Begin::Kind::kMake:
      call.request.body.erase(0, request->arguments_at);
      return Make(begin->id, request->class_name, *factory, call.caller, std::move(call.request));
  }
}

void Space::Make(const base::ObjectId& id, const std::string& class_name, const Factory& factory,
                 const base::MemberId& creator, rpc::Received arguments) {
  auto object = RunFactory(factory, creator, std::move(arguments));
  if (!object.ok()) object = base::Annotate(object.status(), absl::StrCat("making a '", class_name, "'"));
  Replies replies;
  std::shared_ptr<Object> unheld;  // Destroyed here, without the lock.
  {
    absl::MutexLock lock(&mu_);
    if (closed_) {
      unheld = object.ok() ? *std::move(object) : nullptr;
      return;  // Close has answered.
    }
    ForkCore::Finished finished = core_.FinishCreate(id, object.ok());
    auto answer = [&](const base::ForkId& fork, absl::StatusOr<base::ObjectId> result)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                        auto waiting = waiting_.find(fork);
                        if (waiting == waiting_.end()) return;
                        replies.emplace_back(std::move(waiting->second), std::move(result));
                        waiting_.erase(waiting);
                      };
    for (const base::ForkId& fork : finished.holders) answer(fork, id);
    for (const base::ForkId& fork : finished.abandoned) {
      answer(fork, object.ok() ? absl::CancelledError("the reference was given up") : object.status());
    }
    if (!object.ok() || finished.drop) {
      if (object.ok()) unheld = *std::move(object);
      objects_.erase(id);
    } else {
      objects_.at(id).object = *std::move(object);
    }
  }
  for (auto& [responder, result] : replies) Answer(std::move(responder), result);
}

void Space::HandleFind(rpc::ServerCall call) {
  auto request = DecodeFind(call.request.body);
  if (!request.ok()) return std::move(call.responder).Reply(request.status());
  absl::StatusOr<ForkCore::Begin> begin;
  {
    absl::MutexLock lock(&mu_);
    begin = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) -> absl::StatusOr<ForkCore::Begin> {
      ATOLL_RETURN_IF_ERROR(CheckCallerLocked(request->fork, call.caller));
      return core_.Find(request->fork, call.caller, request->pinned_name);
    }();
    if (begin.ok() && begin->kind == ForkCore::Begin::Kind::kWait) {
      waiting_.emplace(request->fork, std::move(call.responder));
      return;  // Make answers.
    }
  }
  if (!begin.ok()) return std::move(call.responder).Reply(begin.status());
  Answer(std::move(call.responder), begin->id);
}

void Space::HandleRelease(rpc::ServerCall call) {
  auto fork = DecodeFork(call.request.body);
  if (!fork.ok()) return std::move(call.responder).Reply(fork.status());
  absl::StatusOr<std::vector<base::ObjectId>> dropped;
  {
    absl::MutexLock lock(&mu_);
    absl::Status status = CheckCallerLocked(*fork, call.caller);
    if (status.ok()) {
      dropped = core_.Release(*fork, call.caller);
    } else {
      dropped = status;
    }
  }
  if (!dropped.ok()) return std::move(call.responder).Reply(dropped.status());
  Drop(*dropped);
  std::move(call.responder).Reply(rpc::Payload{});
}

void Space::HandleCall(rpc::ServerCall call) {
  auto prefix = DecodeCall(call.request.body);
  if (!prefix.ok()) return std::move(call.responder).Reply(prefix.status());
  auto object = Local(prefix->object);
  if (!object.ok()) return std::move(call.responder).Reply(object.status());
  call.request.body.erase(0, prefix->request_at);
  call.method = std::move(prefix->method);
  (*object)->Call(std::move(call));
}

absl::StatusOr<std::vector<at::Tensor>> Space::AllocateForCall(const base::MemberId& caller,
                                                               absl::string_view body,
                                                               absl::Span<const rpc::TensorMeta> metas) {
  auto prefix = DecodeCall(body);
  ATOLL_RETURN_IF_ERROR(prefix.status());
  auto object = Local(prefix->object);
  ATOLL_RETURN_IF_ERROR(object.status());
  auto tensors = (*object)->Allocate(caller, prefix->method, body.substr(prefix->request_at), metas);
  LetGo(prefix->object, *std::move(object));
  if (!tensors.ok() || !tensors->empty()) return tensors;
  for (const rpc::TensorMeta& meta : metas) {
    ATOLL_ASSIGN_OR_RETURN(at::Tensor tensor, buffers_->Allocate(meta));
    tensors->push_back(std::move(tensor));
  }
  return tensors;
}

void Space::LetGo(const base::ObjectId& id, std::shared_ptr<Object> object) {
  {
    absl::MutexLock lock(&mu_);
    auto found = objects_.find(id);
    if (found != objects_.end() && found->second.object == object) object = nullptr;  // Not the last.
  }
  if (object != nullptr) agent_->pool()->Schedule([object = std::move(object)] {});
}

absl::StatusOr<std::shared_ptr<Object>> Space::Local(const base::ObjectId& id) const {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("ObjectSpace::Local"));
  absl::MutexLock lock(&mu_);
  if (closed_) return ClosingError();
  auto found = objects_.find(id);
  if (found == objects_.end() || found->second.object == nullptr) return NoObject(id);
  return found->second.object;
}

void Space::Drop(const std::vector<base::ObjectId>& ids) {
  std::vector<std::shared_ptr<Object>> objects;
  {
    absl::MutexLock lock(&mu_);
    for (const base::ObjectId& id : ids) {
      auto found = objects_.find(id);
      if (found == objects_.end()) continue;
      objects.push_back(std::move(found->second.object));
      objects_.erase(found);
    }
  }
  if (!objects.empty())
    agent_->pool()->Schedule([objects = std::move(objects)]() mutable { objects.clear(); });
}

absl::Status Space::Unpin(absl::string_view pinned_name) {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("ObjectSpace::Unpin"));
  absl::StatusOr<std::vector<base::ObjectId>> dropped;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return ClosedError();
    dropped = core_.Unpin(pinned_name);
  }
  ATOLL_RETURN_IF_ERROR(dropped.status());
  Drop(*dropped);
  return absl::OkStatus();
}

std::vector<ObjectSpace::Entry> Space::List() const {
  std::vector<ObjectSpace::Entry> list;
  if (fork_mark_.in_child()) return list;
  absl::MutexLock lock(&mu_);
  for (ForkCore::Entry& entry : core_.List()) {
    auto held = objects_.find(entry.id);
    if (held == objects_.end()) continue;
    list.push_back({entry.id, held->second.class_name, std::move(entry.name), std::move(entry.holders)});
  }
  return list;
}

void Space::OnPeerGone(const base::MemberId& member, absl::Status reason) {
  if (fork_mark_.in_child()) return;
  std::vector<base::ObjectId> dropped;
  std::vector<std::shared_ptr<Object>> live;
  {
    absl::MutexLock lock(&mu_);
    if (closed_ || member == agent_->self()) return;
    const absl::Status why = reason.ok() ? absl::UnavailableError("it left the job") : reason;
    if (!gone_.Add(member, why)) return;
    dropped = core_.PeerGone(member);
  }
  Drop(dropped);
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [id, held] : objects_) {
      if (held.object != nullptr) live.push_back(held.object);
    }
  }
  if (live.empty()) return;
  events_->Schedule([live = std::move(live), member, reason = std::move(reason)] {
    for (const std::shared_ptr<Object>& object : live) {
      rpc::RunCallback("an object, told who is gone,", [&] { object->OnPeerGone(member, reason); });
    }
  });
}

}  // namespace Atoll::rref
