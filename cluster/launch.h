// Who this process is in its job, as its launcher says: torchrun, Slurm's srun, Open MPI's mpirun,
// Kubernetes, or flags by hand. Only `main` and this file's functions read the environment; everything else
// is given a Launch.
//
//   environment (or flags laid over it) --ParseLaunch--> Launch --Finish--> a checked Launch
//                                      \-------LaunchFromEnvironment------/
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "atoll/base/tls_options.h"

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
  int local_world_size = 0;  ///< Ranks on this host; 0: the launcher did not say.
  std::string name;          ///< "owner0", "worker0": unique in the job. Workers count from 0 too.
  std::string given_name;    ///< A name of the user's own instead (ATOLL_NAME); empty: none.

  /// The coordinator: rank 0's ordinary port. Rank 0 binds it, the others connect to it.
  std::string coordinator_host = "127.0.0.1";
  int coordinator_port = 29500;
  bool is_coordinator() const { return rank == 0; }

  /// Under torchrun MASTER_PORT is taken by the agent's own store: rank 0 then binds any port and publishes
  /// it there (PublishCoordinator, FindCoordinator), keys prefixed with the job.
  bool agent_store = false;

  std::string bind = "127.0.0.1";  ///< Address, host name or interface for our own port.
  /// The first port that we may listen at, and how many there are; 0: any. The coordinator's is coordinator_port.
  int port = 0;
  int port_count = 1;
  std::string key;                                ///< The job key's bytes; empty: see EnsureJobKey.
  base::TlsOptions tls;                           ///< Of TCP connections; the same for all of the job.
  absl::Duration join_limit = absl::Seconds(60);  ///< For all of the job to be there.
};

/// Looks up a variable; nullopt if unset. Tests give their own; a binary lays its flags over the process's.
using Environment = std::function<std::optional<std::string>(absl::string_view)>;
Environment ProcessEnvironment();

/// How errors call what a variable says: for a program whose flags lie over the environment "--rank", or
/// "--rank (RANK)" where the flag was not given. Null: by the variable.
using Naming = std::function<std::string(absl::string_view variable)>;

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun and Kubernetes;
/// JOB_COMPLETION_INDEX stands in for RANK), or OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, or
/// SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_LAUNCH_NODE_IPADDR, or Kubeflow's
/// PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT (one process a pod, or
/// LOCAL_RANK set for each; PET_MASTER_* also stand in for MASTER_* elsewhere); and
/// ATOLL_OWNERS, ATOLL_JOB, ATOLL_NAME, ATOLL_BIND, ATOLL_PORTS, ATOLL_KEY_FILE, ATOLL_KEY, ATOLL_TLS, ATOLL_TLS_CERT,
/// ATOLL_TLS_KEY, ATOLL_TLS_CA, ATOLL_JOIN_LIMIT. Each value that is missing or malformed is named in the error (InvalidArgument), with what it should be. Without any
/// launcher's variables: one process, rank 0 of 1.
absl::StatusOr<Launch> LaunchFromEnvironment(const Environment& environment = ProcessEnvironment(),
                                             const Naming& naming = nullptr);

/// The first half of LaunchFromEnvironment, for a caller that sets fields before Finish: role, name, bind and
/// coordinator_host may still be empty.
absl::StatusOr<Launch> ParseLaunch(const Environment& environment, const Naming& naming = nullptr);

/// Fills `role` and `name` from rank and owners, and `bind` where it is empty: loopback if the job is on
/// one host, else the local address that leads to the coordinator. Refuses with InvalidArgument what cannot
/// be (a rank not below the world size, more owners than ranks, a bad port or range, an empty host, an id or name
/// with characters that do not belong there, a loopback address in a job of several hosts, a TLS mode without
/// its files). May be called
/// again after a change.
absl::Status Finish(Launch& launch, const Naming& naming = nullptr);

/// True if all ranks are known to run on this host: all are local, or the coordinator's address is loopback.
bool OnOneHost(const Launch& launch);

/// A binary's job has at least one owner; a library may host its shards elsewhere. For binaries, after
/// Finish: InvalidArgument if there is no owner, or no worker.
absl::Status RequireOwnersAndWorkers(const Launch& launch);

}  // namespace Atoll::cluster
