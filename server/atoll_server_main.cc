// atoll-server: one owner of a job.
#include <memory>
#include <string>

#include <ATen/Parallel.h>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/cluster/program.h"
#include "atoll/server/owner.h"

ABSL_DECLARE_FLAG(uint64_t, staging_bytes);
ABSL_DECLARE_FLAG(uint64_t, spare_bytes);

namespace {

using namespace Atoll::cluster;  // NOLINT: the programs' part of that folder.

constexpr char kHelp[] =
    R"(atoll-server: an owner. It holds its share of the model's parameters with their optimizer state, sums
the workers' gradients, steps the optimizer and hands out the new values. Rank 0 is an owner and the job's
coordinator: the others find the job at its address. It ends when all workers have left.

One owner and two workers by hand, on one host:
  atoll-server --owners=1 --workers=2 &
  atoll-worker --owners=1 --workers=2 --rank=1 --model=convnet --data=fashion-mnist &
  atoll-worker --owners=1 --workers=2 --rank=2 --model=convnet --data=fashion-mnist
On several hosts, every rank needs the same key, and rank 0's address:
  head -c 32 /dev/urandom > job.key; chmod 600 job.key      # then copy it to every host
  atoll-server --owners=1 --workers=2 --rank=0 --coordinator=10.0.0.1:29500 --key_file=job.key
Under torchrun, srun or mpirun one command line starts all: see atoll-run --help.

Environment, where no flag says otherwise: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (or
Slurm's, Open MPI's, Kubeflow's), torchrun's agent store, ATOLL_OWNERS, ATOLL_JOB, ATOLL_NAME, ATOLL_BIND,
ATOLL_PORTS, ATOLL_KEY_FILE, ATOLL_KEY, ATOLL_TLS, ATOLL_TLS_CERT, ATOLL_TLS_KEY, ATOLL_TLS_CA,
ATOLL_JOIN_LIMIT, ATOLL_LOG_LEVEL.
)";

int Serve(const std::string& who, const FlaggedLaunch& flagged, const NodeFlags& flags, SignalWatch& watch) {
  const Launch& launch = flagged.launch;
  const auto say = [&launch](absl::string_view line) {
    PrintOut(absl::StrCat(launch.name, ": ", line, "\n"));
  };
  Atoll::server::OwnerOptions options;
  options.node.lease = flags.lease;
  options.node.endpoint.enable_unix = flags.enable_unix;
  options.node.endpoint.enable_cma = flags.enable_cma;
  options.memory.staging_bytes = absl::GetFlag(FLAGS_staging_bytes);
  options.memory.spare_bytes = absl::GetFlag(FLAGS_spare_bytes);
  options.patience = flags.grace / 2;  // Of the time that a signal gives, half is for leaving.
  options.say = say;
  const int workers = launch.world_size - launch.owners;
  say(absl::StrCat("waiting for job ", launch.job, ": ", launch.owners, " owners, ", workers, " workers, at ",
                   launch.coordinator_host, ":", launch.coordinator_port));
  absl::StatusOr<std::unique_ptr<Atoll::server::Owner>> owner =
      Atoll::server::Owner::Start(launch, std::move(options));
  if (!owner.ok()) {
    return EndWithError(who, Atoll::base::Annotate(owner.status(), "cannot start the owner"),
                        CodeOfStart(owner.status()));
  }
  watch.OnSignal([&owner](int) { (*owner)->Stop(); });
  std::string addresses;
  for (const std::string& address : (*owner)->node().agent().addresses()) {
    absl::StrAppend(&addresses, addresses.empty() ? "" : ", ", address);
  }
  say(absl::StrCat("serving at ", addresses));
  const absl::Status status = (*owner)->Run();
  watch.OnSignal([](int) {});
  if (!status.ok()) return EndWithError(who, status, kExitFailed);
  say(watch.signal() == 0 ? "done" : "stopped");
  return kExitDone;
}

}  // namespace

int main(int argc, char** argv) {
  SetUpProcess();
  ParseFlags(argc, argv, {"atoll-server", kHelp});
  const absl::StatusOr<NodeFlags> flags = NodeFlagsFromFlags();
  if (!flags.ok()) return EndWithError("atoll-server", flags.status(), kExitUsage);
  const absl::StatusOr<FlaggedLaunch> flagged = LaunchFromFlags(Role::kOwner);
  if (!flagged.ok()) return EndWithError("atoll-server", flagged.status(), kExitUsage);
  const std::string who = absl::StrCat("atoll-server ", flagged->launch.name);
  SignalWatch watch(who, flags->grace);
  at::set_num_threads(1);
  return watch.ExitWith(Serve(who, *flagged, *flags, watch));
}
