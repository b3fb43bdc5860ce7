// atoll-run: becomes atoll-server or atoll-worker, by rank, so that one command line starts a whole job.
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "atoll/base/status.h"
#include "atoll/cluster/program.h"

namespace {

using namespace Atoll::cluster;  // NOLINT: the programs' part of that folder.

constexpr char kHelp[] =
    R"(atoll-run: becomes atoll-server where the rank is an owner's (the first --owners ranks) and
atoll-worker elsewhere, so that one command line under any launcher starts a whole job. It takes the flags
of both, and passes each program its own. The two programs lie beside it.

Two owners and two workers:
  torchrun --nproc-per-node=4 --no-python ./atoll-run --owners=2 --model=convnet --data=fashion-mnist
  srun -n4 ./atoll-run --owners=2 --model=convnet --data=fashion-mnist
  mpirun -n 4 ./atoll-run --owners=2 --model=convnet --data=fashion-mnist
On several hosts give --key_file: a file with the same 16 to 4096 bytes everywhere, chmod 600.

Environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (or those of Slurm, Open MPI, Kubeflow),
torchrun's agent store, and what atoll-server --help lists.
)";

/// The folder of this program's file.
absl::StatusOr<std::string> OwnFolder() {
  char path[PATH_MAX];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path));
  if (size <= 0 || size == sizeof(path)) return Atoll::base::ErrnoStatus(errno, "cannot read /proc/self/exe");
  const std::string text(path, static_cast<size_t>(size));
  return text.substr(0, text.rfind('/'));
}

/// Whether the program of an owner (else of a worker) has the flag of `argument`.
bool IsFor(bool owner, absl::string_view argument) {
  const std::vector<std::string> parts = absl::StrSplit(argument.substr(2), absl::MaxSplits('=', 1));
  const FlagGroup group = FlagGroupOf(parts[0]);
  return group == FlagGroup::kCommon || group == (owner ? FlagGroup::kOwner : FlagGroup::kWorker);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> given = ParseFlags(argc, argv, {"atoll-run", kHelp});
  const absl::StatusOr<Launch> launch = PlacementFromFlags();
  if (!launch.ok()) return EndWithError("atoll-run", launch.status(), kExitUsage);
  const absl::StatusOr<std::string> folder = OwnFolder();
  if (!folder.ok()) return EndWithError("atoll-run", folder.status(), kExitFailed);

  const bool is_owner = launch->role == Role::kOwner;
  const std::string program = absl::StrCat(*folder, is_owner ? "/atoll-server" : "/atoll-worker");
  std::vector<std::string> arguments = {program};
  for (const std::string& argument : given) {
    if (IsFor(is_owner, argument)) arguments.push_back(argument);
  }
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv(program.c_str(), pointers.data());
  return EndWithError("atoll-run", Atoll::base::ErrnoStatus(errno, absl::StrCat("cannot execute ", program)),
                      kExitFailed);
}
