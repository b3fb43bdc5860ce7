// atoll-worker: trains a built-in model with the job's owners.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include <ATen/Parallel.h>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/client/worker_flags_main.h"
#include "atoll/client/worker_report.h"
#include "atoll/cluster/program.h"

namespace {

using Atoll::base::Annotate;
using namespace Atoll::client;   // NOLINT: the main of this folder.
using namespace Atoll::cluster;  // NOLINT

constexpr char kHelp[] =
    R"(atoll-worker: trains a model by name on a data set by name. The parameters' optimizer runs on the
job's owners (atoll-server); this process computes gradients, sends them, and receives new values.

One owner and two workers by hand, on one host:
  atoll-server --owners=1 --workers=2 &
  atoll-worker --owners=1 --workers=2 --rank=1 --model=convnet --data=fashion-mnist &
  atoll-worker --owners=1 --workers=2 --rank=2 --model=convnet --data=fashion-mnist
Under torchrun, srun or mpirun one command line starts all: see atoll-run --help.

Environment, where no flag says otherwise: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (or
Slurm's, Open MPI's, Kubeflow's), torchrun's agent store, ATOLL_OWNERS, ATOLL_JOB, ATOLL_NAME, ATOLL_BIND,
ATOLL_PORTS, ATOLL_KEY_FILE, ATOLL_KEY, ATOLL_TLS, ATOLL_TLS_CERT, ATOLL_TLS_KEY, ATOLL_TLS_CA,
ATOLL_JOIN_LIMIT, ATOLL_LOG_LEVEL.
)";

std::string PartOf(const std::string& path) { return absl::StrCat(path, ".", getpid(), ".part"); }

/// Where `path` leads, and whether something is there that is written into and not replaced: a device, a pipe.
struct Target {
  std::string path;
  bool in_place = false;
};
absl::StatusOr<Target> FindTarget(const std::string& path) {
  std::error_code none;  // A file that is not there yet stays as it is named.
  Target target{std::filesystem::weakly_canonical(path, none).string()};
  if (none) target.path = path;
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return target;
  if (S_ISDIR(found.st_mode)) {
    return Atoll::base::ErrnoStatus(EISDIR, absl::StrCat("cannot write ", path));
  }
  target.in_place = !S_ISREG(found.st_mode);
  if (target.in_place) target.path = path;
  return target;
}

/// Opens what is there (a pipe without a reader is an error, and not waited for), or a new file.
std::FILE* OpenToWrite(const std::string& path, bool in_place) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC | (in_place ? O_NONBLOCK : O_CREAT | O_TRUNC), 0666);
  return fd < 0 ? nullptr : fdopen(fd, "w");
}

/// Whether WriteFile could write there: asked before the work whose result it is.
absl::Status CanWriteFile(const std::string& path) {
  ATOLL_ASSIGN_OR_RETURN(Target target, FindTarget(path));
  const std::string opened = target.in_place ? target.path : PartOf(target.path);
  std::FILE* file = OpenToWrite(opened, target.in_place);
  if (file == nullptr) return Atoll::base::ErrnoStatus(errno, absl::StrCat("cannot write ", path));
  std::fclose(file);
  if (!target.in_place) std::remove(opened.c_str());
  return absl::OkStatus();
}

/// The whole file or nothing: a reader never sees half of it.
absl::Status WriteFile(const std::string& path, const std::string& text) {
  ATOLL_ASSIGN_OR_RETURN(Target target, FindTarget(path));
  const std::string opened = target.in_place ? target.path : PartOf(target.path);
  std::FILE* file = OpenToWrite(opened, target.in_place);
  if (file == nullptr) return Atoll::base::ErrnoStatus(errno, absl::StrCat("cannot write ", path));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool whole = std::fclose(file) == 0 && written;
  if (whole && (target.in_place || std::rename(opened.c_str(), target.path.c_str()) == 0)) {
    return absl::OkStatus();
  }
  const absl::Status error = Atoll::base::ErrnoStatus(errno, absl::StrCat("cannot write ", path));
  if (!target.in_place) std::remove(opened.c_str());
  return error;
}

/// All that is read before the job is joined: wrong input is refused without making others wait.
struct Setup {
  WorkerFlags flags;
  NodeFlags node;
  FlaggedLaunch launch;
  std::unique_ptr<WorkerReport> report;
};

absl::StatusOr<Setup> ReadSetup() {
  Setup setup;
  ATOLL_ASSIGN_OR_RETURN(setup.flags, WorkerFlagsFromFlags());
  ATOLL_ASSIGN_OR_RETURN(setup.node, NodeFlagsFromFlags());
  ATOLL_ASSIGN_OR_RETURN(setup.report,
                         MakeWorkerReport(setup.flags.progress, isatty(STDOUT_FILENO) == 1, PrintOut));
  ATOLL_ASSIGN_OR_RETURN(setup.launch, LaunchFromFlags(Role::kWorker));
  std::string& summary = setup.flags.summary;
  summary = absl::StrReplaceAll(summary, {{"{name}", setup.launch.launch.name}});
  const absl::Status can_write = summary.empty() ? absl::OkStatus() : CanWriteFile(summary);
  if (!can_write.ok()) return Annotate(can_write, "--summary");
  return setup;
}

Atoll::rref::NodeOptions ToNodeOptions(const NodeFlags& flags) {
  Atoll::rref::NodeOptions options;
  options.lease = flags.lease;
  options.endpoint.enable_unix = flags.enable_unix;
  options.endpoint.enable_cma = flags.enable_cma;
  return options;
}

int Train(const std::string& who, Setup& setup, const Data& data, Model& model, SignalWatch& watch) {
  const Launch& launch = setup.launch.launch;
  absl::StatusOr<std::unique_ptr<Session>> session = Session::Join(launch, ToNodeOptions(setup.node));
  if (!session.ok()) {
    return EndWithError(who, Annotate(session.status(), "cannot join the job"),
                        CodeOfStart(session.status()));
  }
  auto stop = std::make_shared<std::atomic<bool>>(false);
  watch.OnSignal([stop](int) { stop->store(true); });

  WorkerFacts facts;
  facts.name = launch.name;
  facts.job = launch.job;
  facts.model = setup.flags.model;
  facts.data = data.name;
  facts.policy =
      std::holds_alternative<Atoll::shard_optim::Sync>(setup.flags.options.policy) ? "sync" : "async";
  facts.owners = launch.owners;
  facts.workers = launch.world_size - launch.owners;
  facts.train_images = data.train.size();
  facts.test_images = data.test.size();
  for (const auto& [name, tensor] : model.parameters().items()) facts.parameters += tensor.numel();
  setup.report->Start(facts);

  const absl::StatusOr<WorkerSummary> summary = RunWorker(
      **session, data, model, setup.flags.options, [stop] { return stop->load(); },
      [&setup](const WorkerProgress& progress) { setup.report->Progress(progress); });
  // Also after an error: others then hear at once that we failed, and why, and need not wait for the lease.
  const absl::Status left = (*session)->Leave(setup.node.grace, summary.status());
  if (!summary.ok()) return EndWithError(who, summary.status(), kExitFailed);
  setup.report->Done(facts, *summary);
  if (!setup.flags.summary.empty()) {
    const absl::Status written = WriteFile(setup.flags.summary, SummaryJson(facts, *summary));
    if (!written.ok()) return EndWithError(who, Annotate(written, "--summary"), kExitFailed);
  }
  if (!left.ok()) ATOLL_LOG(kWarning) << "left the job, but not in order: " << Atoll::base::ErrorText(left);
  return kExitDone;
}

}  // namespace

int main(int argc, char** argv) {
  SetUpProcess();
  ParseFlags(argc, argv, {"atoll-worker", kHelp});
  absl::StatusOr<Setup> setup = ReadSetup();
  if (!setup.ok()) return EndWithError("atoll-worker", setup.status(), kExitUsage);
  const std::string who = absl::StrCat("atoll-worker ", setup->launch.launch.name);
  SignalWatch watch(who, setup->node.grace);
  at::set_num_threads(setup->flags.threads);

  const absl::StatusOr<Data> data = LoadData(setup->flags.data);
  if (!data.ok()) return EndWithError(who, Annotate(data.status(), "--data"), kExitUsage);
  absl::StatusOr<std::unique_ptr<Model>> model =
      MakeModel(setup->flags.model, ShapeOf(*data), setup->flags.options.seed);
  if (!model.ok()) return EndWithError(who, Annotate(model.status(), "--model"), kExitUsage);
  return watch.ExitWith(Train(who, *setup, *data, **model, watch));
}
