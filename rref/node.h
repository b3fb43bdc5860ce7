// One rank's stack, started and stopped in order: endpoint, agent, membership, object space. Servers and
// workers are built on it; several may live in one process.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "atoll/cluster/launch.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/membership.h"
#include "atoll/rref/rref.h"

namespace Atoll::rref {

struct NodeOptions {
  int worker_threads = 4;
  absl::Duration lease = absl::Seconds(10);
  transport::EndpointOptions endpoint;  ///< job, self, key, bind and tls are taken from the Launch; the
                                        ///< coordinator's port too, and ports that it names.
  /// Runs before we join: classes and methods that others may use as soon as we are there are registered
  /// here. An error ends the start.
  std::function<absl::Status(ObjectSpace&, rpc::Agent&)> before_join;
  /// Runs when we have just become a member, before the others are waited for: an observer that is registered
  /// here misses nobody.
  std::function<void(rpc::Membership&)> on_joined;
};

/// Thread-safe. The destructor is Stop with 5 s, and tells the others that this process failed. It belongs to
/// the process that made it: in a child of fork it and its parts fail with FailedPrecondition before a byte
/// is sent, and the destructor does nothing (docs/errors.md).
class Node {
 public:
  /// Binds, joins the job (or serves as its coordinator) and waits until every rank is there (launch.join_limit);
  /// in an open world (world_size kOpenWorld, rank 0, kAnyRank or another) for nobody. Errors: InvalidArgument (a launch that contradicts itself, a wrong bind address),
  /// FailedPrecondition (the port is in use), those of Membership::Join, DeadlineExceeded (names the ranks
  /// that are missing).
  static absl::StatusOr<std::unique_ptr<Node>> Start(const cluster::Launch& launch, NodeOptions options = {});
  virtual ~Node() = default;

  virtual const cluster::Launch& launch() const = 0;
  virtual rpc::Agent& agent() = 0;
  virtual rpc::Membership& membership() = 0;
  virtual ObjectSpace& objects() = 0;

  /// Leaves in order: refuses, drains, leaves, closes, joins. `limit` is for what others decide: the
  /// coordinator waits for the rest to leave, everybody for what is unsent to be received and for handlers to
  /// end. When it has passed, what is left is dropped, and the error says what. Telling that we go and
  /// closing may come on top: up to 1.5 s, and the end of a look-up of a host's name that is under way.
  /// Idempotent. The others are told `why` if it is an error: that this process failed.
  virtual absl::Status Stop(absl::Duration limit, const absl::Status& why = absl::OkStatus()) = 0;
};

}  // namespace Atoll::rref
