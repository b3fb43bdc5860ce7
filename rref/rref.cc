#include "atoll/rref/rref.h"

#include <atomic>
#include <utility>

#include "atoll/base/status.h"
#include "atoll/rref/space.h"
#include "atoll/rref/wire.h"

namespace Atoll::rref {
namespace {

// Of a call that goes nowhere.
void ReturnLoans(rpc::Payload& request) {
  for (rpc::OutTensor& tensor : request.tensors) {
    if (tensor.lent && tensor.on_return) std::exchange(tensor.on_return, nullptr)();
  }
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
    absl::StatusOr<rpc::Agent*> agent = absl::FailedPreconditionError("the object space is shut down");
    if (held != nullptr) agent = held->AgentFor(owner);
    if (!agent.ok()) {
      base::Promise<base::Unit> promise;
      promise.Set(agent.status());
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
    ReturnLoans(request);
    std::move(on_reply)(base::WithRan(
        absl::FailedPreconditionError("the reference is empty: it was moved or released"), base::Ran::kNo));
    return;
  }
  auto space = state_->space.lock();
  absl::StatusOr<rpc::Agent*> agent = base::WithRan(
      absl::FailedPreconditionError("the object space of this reference is shut down"), base::Ran::kNo);
  if (space != nullptr) agent = space->AgentFor(state_->owner);
  if (!agent.ok()) {
    ReturnLoans(request);
    absl::Status status = base::Annotate(agent.status(), method.name);
    if (space == nullptr || !absl::IsUnavailable(status)) return std::move(on_reply)(std::move(status));
    // Never inside Call: the caller may hold a lock that its callback takes.
    space->raw_agent()->pool()->Schedule(
        [status = std::move(status), on_reply = std::move(on_reply)]() mutable {
          std::move(on_reply)(std::move(status));
        });
    return;
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
    CreateRequest request;
    request.fork = space_->NewFork();
    request.class_name = std::string(class_name);
    request.pinned_name = std::move(pinned_name);
    arguments.body = Encode(request, arguments.body);
    return NewReference(owner, CreateMethod(), std::move(arguments), request.fork);
  }

  base::Future<std::shared_ptr<RRef>> Find(absl::string_view owner, std::string pinned_name) override {
    FindRequest request{space_->NewFork(), std::move(pinned_name)};
    rpc::Payload payload;
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
    base::Promise<std::shared_ptr<RRef>> promise;
    auto agent = space_->agent();
    if (!agent.ok()) {
      ReturnLoans(request);
      promise.Set(agent.status());
      return promise.future();
    }
    (*agent)->Call(
        owner, method, std::move(request), {},
        [promise, fork, weak = std::weak_ptr<Space>(space_), owner = std::string(owner)](
            absl::StatusOr<rpc::Received> reply) { promise.Set(Wrap(weak, owner, fork, std::move(reply))); });
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
      auto agent = space->agent();
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
