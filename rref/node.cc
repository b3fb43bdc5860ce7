#include "atoll/rref/node.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/clock.h"
#include "atoll/base/fork.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/cluster/agent_store.h"

namespace Atoll::rref {
namespace {

absl::Status CheckLaunch(const cluster::Launch& launch) {
  const bool open = launch.world_size == cluster::kOpenWorld;
  if (open ? launch.rank < cluster::kAnyRank.value()
           : launch.world_size < 1 || launch.rank < 0 || launch.rank >= launch.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", launch.rank, " of a job of ", launch.world_size, " processes"));
  }
  if (launch.name.empty()) return absl::InvalidArgumentError("the launch gives this process no name");
  return absl::OkStatus();
}

std::string HostPort(absl::string_view host, int port) {
  const bool v6 = absl::StrContains(host, ':') && !absl::StartsWith(host, "[");
  return v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

class NodeImpl : public Node {
 public:
  explicit NodeImpl(cluster::Launch launch) : launch_(std::move(launch)) {}
  ~NodeImpl() override {
    // In a child of fork the parts leave themselves alone.
    absl::Status status;
    if (!fork_mark_.in_child()) {
      status = Stop(absl::Seconds(5), absl::AbortedError("it ended without leaving in order"));
    }
    if (!status.ok()) ATOLL_LOG(kWarning) << "stopping " << launch_.name << ": " << base::ErrorText(status);
    Destroy();
  }

  absl::Status Bring(NodeOptions options);

  const cluster::Launch& launch() const override { return launch_; }
  rpc::Agent& agent() override { return *agent_; }
  rpc::Membership& membership() override { return *membership_; }
  ObjectSpace& objects() override { return *objects_; }

  absl::Status Stop(absl::Duration limit, const absl::Status& why) override;

 private:
  absl::Status Listen(const NodeOptions& options);
  absl::Status Join(const NodeOptions& options);
  void Watch(const NodeOptions& options);
  void Destroy();
  std::string PublicHost() const;

  const base::ForkMark fork_mark_;
  const cluster::Launch launch_;
  std::shared_ptr<transport::Endpoint> endpoint_;
  std::unique_ptr<rpc::Agent> agent_;
  std::shared_ptr<ObjectSpace> objects_;
  std::unique_ptr<rpc::Membership> membership_;

  absl::Mutex stop_mu_;  // Held while stopping: a second caller waits for the first.
  bool stopped_ ABSL_GUARDED_BY(stop_mu_) = false;
  absl::Status stop_status_ ABSL_GUARDED_BY(stop_mu_);
};

absl::Status NodeImpl::Listen(const NodeOptions& options) {
  transport::EndpointOptions endpoint = options.endpoint;
  endpoint.job = launch_.job;
  endpoint.self = base::MemberId{launch_.name, base::NewIncarnation()};
  endpoint.key.bytes = launch_.key;
  endpoint.bind = launch_.bind;
  endpoint.tls = launch_.tls;
  if (launch_.is_coordinator() && !launch_.agent_store) {
    endpoint.port = launch_.coordinator_port;
    endpoint.port_count = 1;
  } else if (launch_.port != 0) {
    endpoint.port = launch_.port;
    endpoint.port_count = launch_.port_count;
    // Who comes before the coordinator, on its host, must not take its place.
    if (!launch_.agent_store) endpoint.last_port = launch_.coordinator_port;
  }
  rpc::AgentOptions agent;
  agent.self = endpoint.self;
  agent.worker_threads = options.worker_threads;
  ATOLL_ASSIGN_OR_RETURN(endpoint_, transport::CreateEndpoint(std::move(endpoint)));
  agent.endpoint = endpoint_;
  ATOLL_ASSIGN_OR_RETURN(agent_, rpc::Agent::Start(std::move(agent)));
  ATOLL_ASSIGN_OR_RETURN(objects_, ObjectSpace::Create(agent_.get()));
  if (options.before_join) ATOLL_RETURN_IF_ERROR(options.before_join(*objects_, *agent_));
  return absl::OkStatus();
}

// Where others reach the port that we bound: an address bound for all interfaces says nothing.
std::string NodeImpl::PublicHost() const {
  if (launch_.bind == "0.0.0.0" || launch_.bind == "::") return launch_.coordinator_host;
  for (const std::string& address : agent_->addresses()) {
    if (absl::StartsWith(address, "unix:")) continue;
    std::string host = address.substr(0, address.rfind(':'));
    if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
    return host;
  }
  return launch_.coordinator_host;
}

absl::Status NodeImpl::Join(const NodeOptions& options) {
  rpc::MembershipOptions membership;
  membership.rank = base::Rank(launch_.rank);
  membership.role = std::string(cluster::RoleName(launch_.role));
  membership.world_size = launch_.world_size;
  membership.lease = options.lease;
  membership.join_limit = launch_.join_limit;
  const absl::Time limit = base::Now() + launch_.join_limit;
  if (launch_.is_coordinator()) {
    ATOLL_ASSIGN_OR_RETURN(membership_, rpc::Membership::Serve(agent_.get(), membership));
    Watch(options);
    if (launch_.agent_store) {
      ATOLL_RETURN_IF_ERROR(
          cluster::PublishCoordinator(launch_, PublicHost(), endpoint_->port(), launch_.join_limit));
    }
  } else {
    std::vector<std::string> coordinator{HostPort(launch_.coordinator_host, launch_.coordinator_port)};
    if (launch_.agent_store) {
      ATOLL_ASSIGN_OR_RETURN(coordinator.front(), cluster::FindCoordinator(launch_, launch_.join_limit));
    }
    membership.join_limit = std::max(limit - base::Now(), absl::Seconds(1));
    ATOLL_ASSIGN_OR_RETURN(membership_,
                           rpc::Membership::Join(agent_.get(), std::move(coordinator), membership));
    Watch(options);
  }
  if (launch_.world_size == cluster::kOpenWorld) return absl::OkStatus();
  return membership_->WaitForAll(std::max(limit - base::Now(), absl::Seconds(1)));
}

void NodeImpl::Watch(const NodeOptions& options) {
  membership_->OnEvent([weak = std::weak_ptr<ObjectSpace>(objects_)](const rpc::MembershipEvent& event) {
    if (event.kind == rpc::MembershipEvent::Kind::kJoined) return;
    auto objects = weak.lock();
    if (objects != nullptr) objects->OnPeerGone(event.member.id, event.reason);
  });
  if (options.on_joined) options.on_joined(*membership_);
}

absl::Status NodeImpl::Bring(NodeOptions options) {
  ATOLL_RETURN_IF_ERROR(CheckLaunch(launch_));
  ATOLL_RETURN_IF_ERROR(Listen(options));
  return Join(options);
}

absl::Status NodeImpl::Stop(absl::Duration limit, const absl::Status& why) {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Node::Stop"));
  absl::MutexLock lock(&stop_mu_);
  if (stopped_) return stop_status_;
  stopped_ = true;
  const absl::Time end = base::Now() + limit;
  auto left = [&] { return std::max(end - base::Now(), absl::Milliseconds(100)); };
  if (membership_ != nullptr) stop_status_.Update(membership_->Leave(left(), why));
  if (agent_ != nullptr) stop_status_.Update(agent_->Shutdown(left()));
  if (endpoint_ != nullptr) endpoint_->Close();
  return stop_status_;
}

// References to the parts stay valid until here, so that a late user meets errors, not freed memory.
void NodeImpl::Destroy() {
  membership_.reset();
  objects_.reset();
  agent_.reset();
  if (endpoint_ != nullptr) endpoint_->Join();
  endpoint_.reset();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Node>> Node::Start(const cluster::Launch& launch, NodeOptions options) {
  auto node = std::make_unique<NodeImpl>(launch);
  ATOLL_RETURN_IF_ERROR(node->Bring(std::move(options)));
  return node;
}

}  // namespace Atoll::rref
