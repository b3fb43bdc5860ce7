#include "atoll/client/session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"

namespace Atoll::client {

Session::Session(std::unique_ptr<cluster::SharedKeyFile> key_file, std::unique_ptr<rref::Node> node)
    : key_file_(std::move(key_file)), node_(std::move(node)) {}
Session::~Session() = default;

absl::StatusOr<std::unique_ptr<Session>> Session::Join(absl::StatusOr<cluster::Launch> launch,
                                                       rref::NodeOptions options) {
  ATOLL_RETURN_IF_ERROR(launch.status());
  if (launch->role != cluster::Role::kWorker || launch->rank < launch->owners) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", launch->rank, " ('", launch->name,
                                                   "') is an owner: ranks 0 .. ", launch->owners - 1,
                                                   " are. A session is for workers"));
  }
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<cluster::SharedKeyFile> key_file, cluster::EnsureJobKey(*launch));
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<rref::Node> node, rref::Node::Start(*launch, std::move(options)));
  return std::unique_ptr<Session>(new Session(std::move(key_file), std::move(node)));
}

absl::Status Session::CheckActive() const {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("this session"));
  if (active()) return absl::OkStatus();
  return absl::FailedPreconditionError("the session has left its job");
}

absl::Status Session::Leave(absl::Duration limit, const absl::Status& why) {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Session::Leave"));
  left_.store(true, std::memory_order_release);
  return node_->Stop(limit, why);
}

int Session::worker_index() const { return node_->launch().rank - node_->launch().owners; }
int Session::worker_count() const { return node_->launch().world_size - node_->launch().owners; }

absl::Status Session::ClaimModel(absl::string_view name) {
  ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Session::ClaimModel"));
  absl::MutexLock lock(&mu_);
  if (models_.insert(std::string(name)).second) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat("this session has a trainer of model '", name,
                                               "' already; another model needs another name"));
}

void Session::ReleaseModel(absl::string_view name) {
  if (in_child()) return;
  absl::MutexLock lock(&mu_);
  models_.erase(std::string(name));
}

}  // namespace Atoll::client
