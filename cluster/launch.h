// Who this process is in its job, as its launcher says: torchrun, Slurm's srun, Open MPI's mpirun,
// Kubernetes, or flags by hand. Only `main` and this file's functions read the environment; everything else
// is given a Launch.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace Atoll::cluster {

enum class Role { kOwner, kWorker };
absl::string_view RoleName(Role role);  // "owner", "worker"

struct Launch {
  std::string job =
      "atoll";  ///< Job id; two jobs on one machine need two. torchrun: its run id and restart count.
  Role role = Role::kWorker;
  int rank = 0;        ///< 0 .. world_size - 1 over owners and workers; owners come first.
  int world_size = 1;  ///< Owners and workers together.
  int owners = 0;      ///< Of world_size, how many are owners: ranks 0 .. owners - 1.
  int local_rank = 0;
  std::string name;  ///< "owner0", "worker0": unique in the job. Workers count from 0 too.

  /// The coordinator: rank 0's ordinary port. Rank 0 binds it, the others connect to it.
  std::string coordinator_host = "127.0.0.1";
  int coordinator_port = 29500;
  bool is_coordinator() const { return rank == 0; }

  /// Under torchrun MASTER_PORT is taken by the agent's own store: rank 0 then binds any port and publishes
  /// it there (PublishCoordinator, FindCoordinator), keys prefixed with the job.
  bool agent_store = false;

  std::string bind = "127.0.0.1";                 ///< Address or interface for our own port.
  std::string key;                                ///< The job key's bytes.
  absl::Duration join_limit = absl::Seconds(60);  ///< For all of the job to be there.
};

/// Looks up a variable; nullopt if unset. Tests give their own.
using Environment = std::function<std::optional<std::string>(absl::string_view)>;
Environment ProcessEnvironment();

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun and Kubernetes), or SLURM_PROCID,
/// SLURM_NTASKS, SLURM_LOCALID, SLURM_LAUNCH_NODE_IPADDR, or OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK;
/// ATOLL_OWNERS, ATOLL_JOB, ATOLL_BIND, ATOLL_KEY_FILE, ATOLL_KEY. Each value that is missing or malformed is
/// named in the error (InvalidArgument), with what it should be. Without any launcher's variables: one
/// process, rank 0 of 1.
absl::StatusOr<Launch> LaunchFromEnvironment(const Environment& environment = ProcessEnvironment());

}  // namespace Atoll::cluster
