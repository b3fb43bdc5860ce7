// Remote objects and references to them.
//
//   user process                      owner process
//   RRef ──(fork id)──> ObjectSpace ═══ ObjectSpace ──> Object (alive while a fork or a name holds it)
//
// An ObjectSpace is one rank's part: the objects it owns and the references it holds. It is built after
// the Agent and destroyed before it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "atoll/base/ids.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rref {

/// What an owner holds. Its methods may be called at the same time from several threads; an object that
/// wants order runs its work on a SerialExecutor of its own.
class Object {
 public:
  virtual ~Object() = default;
  /// Runs `call.method` (a name in the object's own terms). Answers through call.responder, also later.
  virtual void Call(rpc::ServerCall call) = 0;
  /// Where the tensors of a request land; see rpc::MethodOptions::allocate. None (the default) leaves it to
  /// the space: fresh memory where each meta says, on the CPU of buffers that are used again.
  virtual absl::StatusOr<std::vector<at::Tensor>> Allocate(const base::MemberId& caller,
                                                           const rpc::MethodId& method,
                                                           absl::string_view body,
                                                           absl::Span<const rpc::TensorMeta> metas);
  /// A member died or left: its part in unfinished work ends. On the pool.
  virtual void OnPeerGone(const base::MemberId& member, const absl::Status& reason) {}
};

/// Makes an object of a class from a creator's arguments. Runs on the pool; may take its time.
using Factory = std::function<absl::StatusOr<std::shared_ptr<Object>>(const base::MemberId& creator,
                                                                      rpc::Received arguments)>;

class ObjectSpace;

/// One reference. Movable, not copyable (Find makes another of a pinned object); its destruction tells the
/// owner. Thread-safe to call. In a child of fork calls fail with FailedPrecondition, and its destruction
/// tells nobody: the parent has it still.
class RRef {
 public:
  RRef();
  RRef(RRef&&) noexcept;
  RRef& operator=(RRef&&) noexcept;
  ~RRef();

  bool valid() const;
  const base::MemberId& owner() const;
  base::ObjectId id() const;

  /// Calls a method of the object (a name as of rpc::MethodId). As Agent::Call, its errors and where
  /// `on_reply` and the ends of loans run too; NotFound if the owner holds the object no more.
  /// FailedPrecondition (ran: no) if this is empty or its space is gone: with no agent left those run on a
  /// thread of the process.
  void Call(const rpc::MethodId& method, rpc::Payload request, rpc::CallOptions options,
            rpc::OnReply on_reply) const;
  base::Future<rpc::Received> Call(const rpc::MethodId& method, rpc::Payload request,
                                   rpc::CallOptions options = {}) const;
  /// Gives it up now; the future completes when the owner has heard.
  base::Future<base::Unit> Release() &&;

 private:
  friend class ObjectSpaceImpl;
  struct State;
  std::shared_ptr<State> state_;
};

/// Thread-safe. Its destructor waits for references that are just making a call, in other threads; those may
/// outlive it. In a child of fork it fails with FailedPrecondition, and its destructor does nothing.
class ObjectSpace {
 public:
  /// `agent` must outlive it. Registers rref's methods there.
  static absl::StatusOr<std::unique_ptr<ObjectSpace>> Create(rpc::Agent* agent);
  virtual ~ObjectSpace() = default;

  virtual absl::Status RegisterClass(std::string class_name, Factory factory) = 0;

  /// Creates an object on the member named `owner`. With a `pinned_name` the owner itself holds it under
  /// that name until Unpin (the death of all users frees nothing), and a second creation under the name
  /// gives a reference to the first (its arguments are then ignored: get-or-create).
  /// Errors: NotFound (no such class, no such member), what the factory said, those of Agent::Call.
  virtual base::Future<std::shared_ptr<RRef>> Create(absl::string_view owner, absl::string_view class_name,
                                                     rpc::Payload arguments,
                                                     std::string pinned_name = "") = 0;
  /// A reference to a pinned object, by name. NotFound lists nothing but says the name and the owner.
  virtual base::Future<std::shared_ptr<RRef>> Find(absl::string_view owner, std::string pinned_name) = 0;
  virtual absl::Status Unpin(absl::string_view pinned_name) = 0;

  /// The object itself, on its owner. NotFound where it is not.
  virtual absl::StatusOr<std::shared_ptr<Object>> Local(base::ObjectId id) const = 0;

  /// Who holds what, for status pages and tests.
  struct Entry {
    base::ObjectId id;
    std::string class_name;
    std::string pinned_name;  ///< Empty if not pinned.
    std::vector<base::MemberId> holders;
  };
  virtual std::vector<Entry> List() const = 0;

  /// A member died or left (from membership): its references here are released, its objects are gone.
  virtual void OnPeerGone(const base::MemberId& member, absl::Status reason) = 0;
};

}  // namespace Atoll::rref
