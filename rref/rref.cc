#include "atoll/rref/rref.h"

#include <utility>

#include "atoll/base/executor.h"
#include "atoll/base/fork.h"
#include "atoll/base/status.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rref/space.h"
#include "atoll/rref/wire.h"

namespace Atoll::rref {
namespace {

// For ends of calls where no agent is left to run them. Of the process: references may outlive all else.
// Null: none.
base::Executor* Orphans() {
  struct Threads {
    base::ForkMark mark;
    base::ThreadPool pool{{.name = "rref-ends", .threads = 1}};
  };
  static auto* const threads = new Threads;
  return threads->mark.in_child() ? nullptr : &threads->pool;
}

// Those of a reference into `space` (or nullptr). A child of fork has no other thread.
base::Executor* OrphansOf(const Space* space) {
  return space != nullptr && space->fork_mark().in_child() ? nullptr : Orphans();
}

// Ends a call that goes nowhere, on `executor`; null: here. Never inside Call where there is another thread:
// the caller may hold a lock that its callbacks take.
void Refuse(base::Executor* executor, rpc::Payload request, rpc::OnReply on_reply, absl::Status why) {
  base::Task end = [request = std::move(request), on_reply = std::move(on_reply),
                    why = std::move(why)]() mutable {
    for (rpc::OutTensor& tensor : request.tensors) {
      if (tensor.lent && tensor.on_return) {
        rpc::RunCallback("the end of a loan", std::move(tensor.on_return));
      }
    }
    rpc::RunCallback(rpc::kOnReply, std::move(on_reply), std::move(why));
  };
  executor == nullptr ? std::move(end)() : executor->Schedule(std::move(end));
}

}  // namespace

struct RRef::State {
  std::weak_ptr<Space> space;
  base::MemberId owner;
  base::ObjectId id;
  base::ForkId fork;

  // Tells the owner, where both are still there to talk.
  base::Future<base::Unit> Release() {
    auto held = space.lock();
    absl::StatusOr<Space::AgentUse> agent = absl::FailedPreconditionError("the object space is shut down");
    if (held != nullptr) agent = held->UseAgent();
    const absl::Status status = agent.ok() ? held->CheckOwner(owner) : agent.status();
    if (!status.ok()) {
      base::Promise<base::Unit> promise;
      promise.Set(status);
      return promise.future();
    }
    rpc::Payload request;
    request.body = Encode(fork);
    return (*agent)->Send(owner.name, ReleaseMethod(), std::move(request));
  }
};

RRef::RRef() = default;
RRef::RRef(RRef&&) noexcept = default;
RRef& RRef::operator=(RRef&& other) noexcept {
  if (this == &other) return *this;
  if (state_ != nullptr) state_->Release();
  state_ = std::move(other.state_);
  return *this;
}
RRef::~RRef() {
  if (state_ != nullptr) state_->Release();
}

bool RRef::valid() const { return state_ != nullptr; }

const base::MemberId& RRef::owner() const {
  static const base::MemberId* const none = new base::MemberId;
  return state_ == nullptr ? *none : state_->owner;
}

base::ObjectId RRef::id() const { return state_ == nullptr ? base::ObjectId{} : state_->id; }

void RRef::Call(const rpc::MethodId& method, rpc::Payload request, rpc::CallOptions options,
                rpc::OnReply on_reply) const {
  if (state_ == nullptr) {
    return Refuse(
        Orphans(), std::move(request), std::move(on_reply),
        base::WithRan(absl::FailedPreconditionError("the reference is empty: it was moved or released"),
                      base::Ran::kNo));
  }
  auto space = state_->space.lock();
  absl::StatusOr<Space::AgentUse> agent = base::WithRan(
      absl::FailedPreconditionError("the object space of this reference is shut down"), base::Ran::kNo);
  if (space != nullptr) agent = space->UseAgent();
  absl::Status status = base::WithRan(CheckMethod(method), base::Ran::kNo);
  if (status.ok()) status = base::Annotate(agent.status(), method.name);
  if (status.ok()) status = base::Annotate(space->CheckOwner(state_->owner), method.name);
  if (!status.ok()) {
    base::Executor* const executor = agent.ok() ? (*agent)->pool() : OrphansOf(space.get());
    return Refuse(executor, std::move(request), std::move(on_reply), std::move(status));
  }
  request.body = Encode(CallPrefix{state_->id, method}, request.body);
  (*agent)->Call(
      state_->owner.name, CallMethod(), std::move(request), std::move(options),
      [name = method.name, on_reply = std::move(on_reply)](absl::StatusOr<rpc::Received> reply) mutable {
        if (!reply.ok()) reply = base::Annotate(reply.status(), name);
        std::move(on_reply)(std::move(reply));
      });
}

base::Future<rpc::Received> RRef::Call(const rpc::MethodId& method, rpc::Payload request,
                                       rpc::CallOptions options) const {
  base::Promise<rpc::Received> promise;
  Call(method, std::move(request), std::move(options),
       [promise](absl::StatusOr<rpc::Received> reply) { promise.Set(std::move(reply)); });
  return promise.future();
}

base::Future<base::Unit> RRef::Release() && {
  if (state_ == nullptr) {
    base::Promise<base::Unit> promise;
    promise.Set(absl::FailedPreconditionError("the reference is empty: it was moved or released"));
    return promise.future();
  }
  return std::exchange(state_, nullptr)->Release();
}

class ObjectSpaceImpl : public ObjectSpace {
 public:
  explicit ObjectSpaceImpl(std::shared_ptr<Space> space) : space_(std::move(space)) {}
  ~ObjectSpaceImpl() override {
    if (space_->fork_mark().in_child()) {
      base::Abandon(std::shared_ptr<Space>(space_));
      return;
    }
    space_->Close();
  }

  absl::Status RegisterClass(std::string class_name, Factory factory) override {
    return space_->RegisterClass(std::move(class_name), std::move(factory));
  }

  base::Future<std::shared_ptr<RRef>> Create(absl::string_view owner, absl::string_view class_name,
                                             rpc::Payload arguments, std::string pinned_name) override {
    absl::Status named = CheckClassName(class_name);
    if (named.ok() && !pinned_name.empty()) named = CheckPinnedName(pinned_name);
    if (!named.ok()) return RefusedReference(std::move(arguments), std::move(named));
    CreateRequest request;
    request.fork = space_->NewFork();
    request.class_name = std::string(class_name);
    request.pinned_name = std::move(pinned_name);
    arguments.body = Encode(request, arguments.body);
    return NewReference(owner, CreateMethod(), std::move(arguments), request.fork);
  }

  base::Future<std::shared_ptr<RRef>> Find(absl::string_view owner, std::string pinned_name) override {
    rpc::Payload payload;
    if (absl::Status named = CheckPinnedName(pinned_name); !named.ok()) {
      return RefusedReference(std::move(payload), std::move(named));
    }
    FindRequest request{space_->NewFork(), std::move(pinned_name)};
    payload.body = Encode(request);
    return NewReference(owner, FindMethod(), std::move(payload), request.fork);
  }

  absl::Status Unpin(absl::string_view pinned_name) override { return space_->Unpin(pinned_name); }
  absl::StatusOr<std::shared_ptr<Object>> Local(base::ObjectId id) const override {
    return space_->Local(id);
  }
  std::vector<Entry> List() const override { return space_->List(); }
  void OnPeerGone(const base::MemberId& member, absl::Status reason) override {
    space_->OnPeerGone(member, std::move(reason));
  }

 private:
  // Asks `owner` for a reference that we name `fork`, and wraps the answer.
  base::Future<std::shared_ptr<RRef>> NewReference(absl::string_view owner, const rpc::MethodId& method,
                                                   rpc::Payload request, base::ForkId fork) {
    auto agent = space_->UseAgent();
    if (!agent.ok()) return RefusedReference(std::move(request), agent.status());
    base::Promise<std::shared_ptr<RRef>> promise;
    (*agent)->Call(
        owner, method, std::move(request), {},
        [promise, fork, weak = std::weak_ptr<Space>(space_), owner = std::string(owner)](
            absl::StatusOr<rpc::Received> reply) { promise.Set(Wrap(weak, owner, fork, std::move(reply))); });
    return promise.future();
  }

  // Nothing was sent.
  base::Future<std::shared_ptr<RRef>> RefusedReference(rpc::Payload request, absl::Status why) {
    base::Promise<std::shared_ptr<RRef>> promise;
    Refuse(
        OrphansOf(space_.get()), std::move(request),
        [promise](const absl::StatusOr<rpc::Received>& refused) { promise.Set(refused.status()); },
        base::WithRan(std::move(why), base::Ran::kNo));
    return promise.future();
  }

  static absl::StatusOr<std::shared_ptr<RRef>> Wrap(const std::weak_ptr<Space>& weak,
                                                    const std::string& owner, base::ForkId fork,
                                                    absl::StatusOr<rpc::Received> reply) {
    absl::StatusOr<base::ObjectId> id = reply.ok() ? DecodeObject(reply->body) : reply.status();
    if (id.ok()) {
      auto rref = std::make_shared<RRef>();
      rref->state_ = std::make_shared<RRef::State>();
      rref->state_->space = weak;
      rref->state_->owner = base::MemberId{owner, id->creator};
      rref->state_->id = *id;
      rref->state_->fork = fork;
      return rref;
    }
    // The owner may hold the reference, or come to: it is told that nobody wants it.
    auto space = weak.lock();
    if (space != nullptr && base::GetRan(id.status()) == base::Ran::kMaybe) {
      auto agent = space->UseAgent();
      if (agent.ok()) {
        rpc::Payload release;
        release.body = Encode(fork);
        (*agent)->Send(owner, ReleaseMethod(), std::move(release));
      }
    }
    return id.status();
  }

  const std::shared_ptr<Space> space_;
};

absl::StatusOr<std::unique_ptr<ObjectSpace>> ObjectSpace::Create(rpc::Agent* agent) {
  auto space = std::make_shared<Space>(agent);
  ATOLL_RETURN_IF_ERROR(space->Serve());
  return std::make_unique<ObjectSpaceImpl>(std::move(space));
}

}  // namespace Atoll::rref
