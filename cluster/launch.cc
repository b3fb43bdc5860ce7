#include "atoll/cluster/launch.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "atoll/base/status.h"
#include "atoll/base/words.h"
#include "atoll/cluster/job_key.h"

namespace Atoll::cluster {
namespace {

constexpr int kMaxWorld = 1 << 20;

/// What a value in an error is called by.
class Namer {
 public:
  explicit Namer(const Naming& naming) : naming_(naming) {}

  std::string Name(absl::string_view variable) const {
    return naming_ == nullptr ? std::string(variable) : naming_(variable);
  }
  /// Whether it goes by another name than the launcher gave it.
  bool Renames(absl::string_view variable) const { return Name(variable) != variable; }
  /// Of a Launch, whose fields need not come from a variable: "rank (RANK) 4", or "--rank=4".
  std::string Value(absl::string_view what, absl::string_view variable, absl::string_view value) const {
    return Renames(variable) ? absl::StrCat(Name(variable), "=", value)
                             : absl::StrCat(what, " (", variable, ") ", value);
  }
  absl::Status Bad(absl::string_view variable, absl::string_view value, absl::string_view should) const {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(variable), "='", absl::CHexEscape(value), "': it should be ", should));
  }
  absl::Status Missing(absl::string_view variable, absl::string_view should) const {
    return absl::InvalidArgumentError(absl::StrCat(Name(variable), " is not set: it should be ", should));
  }

 private:
  const Naming& naming_;
};

/// Reads variables and latches the first error, so that the code below reads straight on.
class Reader {
 public:
  Reader(const Environment& environment, const Naming& naming) : environment_(environment), named_(naming) {}

  const Namer& named() const { return named_; }

  bool Has(absl::string_view variable) const { return environment_(variable).has_value(); }

  /// A whole number in [low, high]. `fallback` where it is not set; without one that is an error.
  int Number(absl::string_view variable, int low, int high, absl::string_view what,
             std::optional<int> fallback = std::nullopt) {
    std::optional<std::string> text = environment_(variable);
    std::string should = absl::StrCat(what, ", a whole number from ", low, " to ", high);
    if (!text.has_value()) {
      if (!fallback.has_value()) Latch(named_.Missing(variable, should));
      return fallback.value_or(low);
    }
    int value = low;
    if (!absl::SimpleAtoi(*text, &value) || value < low || value > high) {
      Latch(named_.Bad(variable, *text, should));
      return low;
    }
    return value;
  }

  std::string Text(absl::string_view variable, absl::string_view what, std::string fallback) {
    std::optional<std::string> text = environment_(variable);
    if (!text.has_value()) return fallback;
    if (text->empty()) Latch(named_.Bad(variable, "", absl::StrCat(what, ", or not set at all")));
    return *text;
  }

  void Latch(absl::Status status) {
    if (status_.ok()) status_ = std::move(status);
  }
  const absl::Status& status() const { return status_; }

 private:
  const Environment& environment_;
  const Namer named_;
  absl::Status status_;
};

/// "n[3-5,7],m1" -> "n3", Slurm's form of a list of hosts; its first.
std::string FirstOfHostList(absl::string_view list) {
  std::string first;
  size_t at = 0;
  while (at < list.size() && list[at] != ',') {
    if (list[at] != '[') {
      first += list[at++];
      continue;
    }
    for (++at; at < list.size() && list[at] != ',' && list[at] != '-' && list[at] != ']'; ++at)
      first += list[at];
    while (at < list.size() && list[at] != ']') ++at;
    if (at < list.size()) ++at;
  }
  return first;
}

bool Resolves(const std::string& host) {
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, nullptr, &found) != 0) return false;
  freeaddrinfo(found);
  return true;
}

void ReadRanks(Reader& read, Launch& launch, absl::string_view rank, absl::string_view size,
               absl::string_view local_rank, absl::string_view local_size, absl::string_view launcher) {
  const auto what = [&](absl::string_view variable, absl::string_view words) {
    return read.named().Renames(variable) ? std::string(words) : absl::StrCat(words, " (", launcher, ")");
  };
  launch.world_size = read.Number(size, 1, kMaxWorld, what(size, "the number of ranks"));
  launch.rank = read.Number(rank, 0, kMaxWorld - 1, what(rank, "this process's rank"));
  launch.local_rank = read.Number(local_rank, 0, kMaxWorld - 1, "the rank on this host", 0);
  launch.local_world_size = read.Number(local_size, 0, kMaxWorld, "the number of ranks on this host", 0);
}

/// Of `variable` and torchrun's own name for it (PET_...: what `torchrun --option` reads), the one that is set.
absl::string_view OrPet(const Reader& read, absl::string_view variable, absl::string_view pet) {
  return !read.Has(variable) && read.Has(pet) ? pet : variable;
}

/// "4", or "4:4" for torchrun's elastic form. A range has no one world size.
int ReadNodes(Reader& read) {
  const std::string text = read.Text("PET_NNODES", "the number of nodes", "1");
  const size_t colon = text.find(':');
  int low = 0, high = 0;
  if (!absl::SimpleAtoi(text.substr(0, colon), &low) ||
      !absl::SimpleAtoi(colon == std::string::npos ? text : text.substr(colon + 1), &high) || low != high ||
      low < 1 || low > kMaxWorld) {
    read.Latch(read.named().Bad("PET_NNODES", text,
                                "one whole number of nodes (a job has a fixed number of ranks)"));
    return 1;
  }
  return low;
}

/// How many processes torchrun would start here. "auto", "gpu" and "cpu" are its to count: without it, one.
int ReadProcessesPerNode(Reader& read) {
  const std::string text = read.Text("PET_NPROC_PER_NODE", "the number of processes a node", "1");
  if (text == "auto" || text == "gpu" || text == "cpu") return 1;
  const int count = read.Number("PET_NPROC_PER_NODE", 1, kMaxWorld, "the number of processes a node", 1);
  if (count > 1 && !read.Has("LOCAL_RANK")) {
    read.Latch(absl::InvalidArgumentError(
        absl::StrCat("PET_NPROC_PER_NODE='", text,
                     "', but this process was not started by torchrun, which would make ", text,
                     " of one: start it with torchrun --no-python, or one process a pod (numProcPerNode, "
                     "nprocPerNode: 1), or "
                     "set RANK, WORLD_SIZE and LOCAL_RANK for each")));
  }
  return count;
}

/// Kubeflow's Trainer describes pods to a torchrun that it expects in them. Our programs may stand in its place,
/// one a pod.
void ReadPods(Reader& read, Launch& launch) {
  const int nodes = ReadNodes(read), each = ReadProcessesPerNode(read);
  const absl::string_view index = OrPet(read, "PET_NODE_RANK", "JOB_COMPLETION_INDEX");
  const int node = read.Number(index, 0, nodes - 1, "this node's rank (Kubeflow)",
                               nodes == 1 ? std::optional<int>(0) : std::nullopt);
  launch.local_rank = read.Number("LOCAL_RANK", 0, each - 1, "the rank on this host", 0);
  launch.local_world_size = each;
  launch.world_size = nodes * each;
  launch.rank = node * each + launch.local_rank;
  if (launch.coordinator_host.empty() && nodes == 1) launch.coordinator_host = "127.0.0.1";
}

void ReadTorchrun(Reader& read, Launch& launch) {
  absl::string_view rank = OrPet(read, "RANK", "PET_NODE_RANK");
  if (!read.Has(rank) && read.Has("JOB_COMPLETION_INDEX")) rank = "JOB_COMPLETION_INDEX";
  // Kubeflow's PyTorchJob counts pods in RANK, but processes in WORLD_SIZE.
  if (read.Has("PET_NPROC_PER_NODE")) ReadProcessesPerNode(read);
  ReadRanks(read, launch, rank, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "torchrun, Kubernetes");
  std::string run = read.Text("TORCHELASTIC_RUN_ID", "torchrun's run id", "");
  if (run.empty()) return;
  // torchrun's default run id is "none" for every job of a machine: its port tells them apart.
  launch.job = run == "none" ? absl::StrCat("torchrun-", launch.coordinator_port) : run;
  launch.agent_store =
      absl::EqualsIgnoreCase(read.Text("TORCHELASTIC_USE_AGENT_STORE", "True or False", "False"), "true");
}

void ReadSlurm(Reader& read, Launch& launch) {
  ReadRanks(read, launch, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "ATOLL_LOCAL_WORLD_SIZE", "srun");
  int nodes = read.Number("SLURM_STEP_NUM_NODES", 1, kMaxWorld, "the step's number of nodes", 0);
  if (nodes == 0) nodes = read.Number("SLURM_NNODES", 1, kMaxWorld, "the job's number of nodes", 0);
  if (nodes == 1) launch.local_world_size = launch.world_size;
  unsigned job = static_cast<unsigned>(read.Number("SLURM_JOB_ID", 0, INT32_MAX, "the job's id", 0));
  std::string step = read.Text("SLURM_STEP_ID", "the step's id", "0");
  launch.job = absl::StrCat("slurm-", job, ".", step);
  int restarts = read.Number("SLURM_RESTART_COUNT", 0, INT32_MAX, "how often the job was restarted", 0);
  if (restarts > 0) absl::StrAppend(&launch.job, ".r", restarts);
  unsigned step_number = 0;
  if (!absl::SimpleAtoi(step, &step_number)) step_number = 0;
  // Below the ephemeral ports, and apart for jobs that share a node.
  if (!read.Has("MASTER_PORT") && !read.Has("PET_MASTER_PORT")) {
    launch.coordinator_port = 20000 + static_cast<int>((job * 31u + step_number) % 10000u);
  }
  if (!launch.coordinator_host.empty()) return;
  if (nodes == 1) {
    launch.coordinator_host = "127.0.0.1";
    return;
  }
  // Rank 0 runs on the first node of the step, not on the node where srun was typed; the latter is right
  // inside sbatch, and all there is where node names do not resolve.
  std::string first = FirstOfHostList(read.Text("SLURM_STEP_NODELIST", "the step's nodes", ""));
  if (!first.empty() && Resolves(first)) {
    launch.coordinator_host = first;
  } else {
    launch.coordinator_host = read.Text("SLURM_LAUNCH_NODE_IPADDR", "the address of srun's node", "");
  }
}

void ReadOpenMpi(Reader& read, Launch& launch) {
  ReadRanks(read, launch, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun");
  launch.job = absl::StrCat("mpi-", read.Text("PMIX_NAMESPACE", "PMIx's name of the job", "atoll"));
  if (launch.coordinator_host.empty() && launch.local_world_size == launch.world_size) {
    launch.coordinator_host = "127.0.0.1";
  }
}

/// "0", "7000" or "7000-7010". (Not ATOLL_PORT: Kubernetes sets that where a service is called atoll.)
void ReadPorts(Reader& read, Launch& launch) {
  const std::string text = read.Text("ATOLL_PORTS", "a port or a range of ports", "0");
  const size_t dash = text.find('-');
  int first = 0, last = 0;
  const bool range = dash != std::string::npos;
  if (!absl::SimpleAtoi(text.substr(0, dash), &first) ||
      !absl::SimpleAtoi(range ? text.substr(dash + 1) : text, &last) || first < (range ? 1 : 0) ||
      last < first || last > 65535) {
    read.Latch(
        read.named().Bad("ATOLL_PORTS", text,
                         "a port from 1 to 65535, a range of them such as 7000-7010, or 0 for any free one"));
    return;
  }
  launch.port = first;
  launch.port_count = last - first + 1;
}

void ReadKey(Reader& read, Launch& launch) {
  if (read.Has("ATOLL_KEY") && read.Has("ATOLL_KEY_FILE")) {
    read.Latch(absl::InvalidArgumentError(
        "ATOLL_KEY and ATOLL_KEY_FILE are both set: one of them is enough, the file is safer"));
    return;
  }
  std::string path = read.Text("ATOLL_KEY_FILE", "the path of the job key's file", "");
  if (!path.empty()) {
    absl::StatusOr<std::string> key = ReadKeyFile(path);
    if (key.ok()) launch.key = *std::move(key);
    read.Latch(base::Annotate(key.status(), read.named().Name("ATOLL_KEY_FILE")));
  } else if (read.Has("ATOLL_KEY")) {
    launch.key = read.Text("ATOLL_KEY", "the job key", "");
    read.Latch(base::Annotate(CheckKey(launch.key), "ATOLL_KEY"));
  }
}

void ReadTls(Reader& read, Launch& launch) {
  const std::string mode = read.Text("ATOLL_TLS", "none, psk or cert", "none");
  if (std::optional<base::TlsMode> known = base::ParseTlsMode(mode); known.has_value()) {
    launch.tls.mode = *known;
  } else if (!mode.empty()) {
    read.Latch(read.named().Bad("ATOLL_TLS", mode, "none, psk or cert"));
  }
  launch.tls.certificate_file = read.Text("ATOLL_TLS_CERT", "the path of a certificate", "");
  launch.tls.key_file = read.Text("ATOLL_TLS_KEY", "the path of its private key", "");
  launch.tls.ca_file = read.Text("ATOLL_TLS_CA", "the path of the job's CA", "");
}

/// The names of jobs and members stand in file names, socket names, logs and keys.
absl::Status CheckWord(absl::string_view what, absl::string_view word, size_t max_bytes) {
  if (word.empty() || word.size() > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " has ", word.size(), " characters: it should have 1 to ", max_bytes));
  }
  if (!base::IsWord(word, max_bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " '", absl::CHexEscape(word), "' should be of ", base::kWordLetters, " only"));
  }
  return absl::OkStatus();
}

bool IsJoinLimit(absl::Duration limit) { return limit > absl::ZeroDuration() && limit <= absl::Hours(24); }

bool IsLoopback(absl::string_view host) {
  return host == "localhost" || host == "::1" || host == "ip6-localhost" || absl::StartsWith(host, "127.");
}

/// The local address that packets to `host` leave from; no packet is sent. Empty if it does not resolve.
std::string AddressTowards(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), absl::StrCat(port).c_str(), &hints, &found) != 0) return "";
  std::string address;
  for (addrinfo* one = found; one != nullptr && address.empty(); one = one->ai_next) {
    int fd = socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage local{};
    socklen_t length = sizeof(local);
    char text[NI_MAXHOST];
    if (connect(fd, one->ai_addr, one->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      address = text;
    }
    close(fd);
  }
  freeaddrinfo(found);
  return address;
}

}  // namespace

absl::string_view RoleName(Role role) { return role == Role::kOwner ? "owner" : "worker"; }

Environment ProcessEnvironment() {
  return [](absl::string_view variable) -> std::optional<std::string> {
    const char* value = std::getenv(std::string(variable).c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  };
}

absl::StatusOr<Launch> ParseLaunch(const Environment& environment, const Naming& naming) {
  Reader read(environment, naming);
  Launch launch;
  launch.bind = read.Text("ATOLL_BIND", "an address or interface of this host", "");
  launch.coordinator_host =
      read.Text(OrPet(read, "MASTER_ADDR", "PET_MASTER_ADDR"), "the host of rank 0", "");
  launch.coordinator_port =
      read.Number(OrPet(read, "MASTER_PORT", "PET_MASTER_PORT"), 0, 65535, "the port of rank 0", 29500);

  if (read.Has("RANK") || read.Has("WORLD_SIZE")) {
    ReadTorchrun(read, launch);
  } else if (read.Has("OMPI_COMM_WORLD_RANK") || read.Has("OMPI_COMM_WORLD_SIZE")) {
    // Before Slurm's: mpirun inside a Slurm job leaves its daemons' SLURM_PROCID in our environment.
    ReadOpenMpi(read, launch);
  } else if (read.Has("SLURM_PROCID")) {
    ReadSlurm(read, launch);
  } else if (read.Has("PET_NNODES") || read.Has("PET_NODE_RANK")) {
    ReadPods(read, launch);
  } else {
    launch.local_world_size = 1;
    if (launch.coordinator_host.empty()) launch.coordinator_host = "127.0.0.1";
  }

  launch.job = read.Text("ATOLL_JOB", "the job's id", launch.job);
  int restarts = read.Number("TORCHELASTIC_RESTART_COUNT", 0, INT32_MAX, "how often the job restarted", 0);
  if (restarts > 0) absl::StrAppend(&launch.job, ".r", restarts);
  launch.owners = read.Number("ATOLL_OWNERS", 0, kMaxWorld, "the number of owners", 0);
  launch.given_name = read.Text("ATOLL_NAME", "this process's name", "");
  std::string limit = read.Text("ATOLL_JOIN_LIMIT", "a time such as 60s", "60s");
  if (!absl::ParseDuration(limit, &launch.join_limit) || !IsJoinLimit(launch.join_limit)) {
    read.Latch(
        read.named().Bad("ATOLL_JOIN_LIMIT", limit, "a time above zero and at most 24h, such as 60s or 5m"));
  }
  ReadPorts(read, launch);
  ReadKey(read, launch);
  ReadTls(read, launch);
  if (!read.status().ok()) return read.status();
  return launch;
}

bool OnOneHost(const Launch& launch) {
  return launch.world_size == 1 || launch.local_world_size >= launch.world_size ||
         IsLoopback(launch.coordinator_host);
}

absl::Status Finish(Launch& launch, const Naming& naming) {
  const Namer named(naming);
  const auto refuse = [&named](absl::string_view what, absl::string_view variable, int value,
                               absl::string_view should) {
    return absl::InvalidArgumentError(absl::StrCat(named.Value(what, variable, absl::StrCat(value)), should));
  };
  if (launch.world_size < 1) {
    return refuse("the world size", "WORLD_SIZE", launch.world_size, ": it should be at least 1");
  }
  const std::string in_world = absl::StrCat(
      " in a world of ", launch.world_size,
      named.Renames("WORLD_SIZE") ? absl::StrCat(", by ", named.Name("WORLD_SIZE")) : " (WORLD_SIZE)",
      ": it should be from 0 to ");
  if (launch.rank < 0 || launch.rank >= launch.world_size) {
    return refuse("rank", "RANK", launch.rank, absl::StrCat(in_world, launch.world_size - 1));
  }
  if (launch.owners < 0 || launch.owners > launch.world_size) {
    return refuse("the number of owners", "ATOLL_OWNERS", launch.owners,
                  absl::StrCat(in_world, launch.world_size));
  }
  if (launch.coordinator_host.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        named.Name("MASTER_ADDR"),
        " is not set, nor does the launcher tell the host of rank 0: it should be ",
        named.Renames("MASTER_ADDR") ? "HOST:PORT of rank 0 (127.0.0.1:29500 is taken only where --workers "
                                       "or --world_size is given too)"
                                     : "a host name or address (127.0.0.1 if all ranks are on one host)"));
  }
  // Port 0 is for a coordinator whose port the system chooses and that tells the others by other means.
  bool any_port = launch.is_coordinator() && !launch.agent_store;
  if (launch.coordinator_port < (any_port ? 0 : 1) || launch.coordinator_port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(named.Name("MASTER_PORT"), " ", launch.coordinator_port,
                                                   ": the coordinator's port should be from 1 to 65535"));
  }
  if (launch.port < 0 || launch.port_count < 1 || launch.port > 65535 ||
      launch.port_count > 65536 - launch.port) {
    return absl::InvalidArgumentError(absl::StrCat("the ports (ATOLL_PORTS) from ", launch.port, " on, ",
                                                   launch.port_count,
                                                   " in all: they should be from 1 to 65535"));
  }
  if (!IsJoinLimit(launch.join_limit)) {
    return absl::InvalidArgumentError(absl::StrCat("the join limit (", named.Name("ATOLL_JOIN_LIMIT"),
                                                   ") should be above zero and at most 24h"));
  }
  launch.role = launch.rank < launch.owners ? Role::kOwner : Role::kWorker;
  int index = launch.role == Role::kOwner ? launch.rank : launch.rank - launch.owners;
  launch.name = launch.given_name.empty() ? absl::StrCat(RoleName(launch.role), index) : launch.given_name;
  ATOLL_RETURN_IF_ERROR(CheckWord(
      named.Renames("ATOLL_JOB") ? named.Name("ATOLL_JOB") : "the job's id (ATOLL_JOB)", launch.job, 128));
  ATOLL_RETURN_IF_ERROR(
      CheckWord(named.Renames("ATOLL_NAME") ? named.Name("ATOLL_NAME") : "the name (ATOLL_NAME)", launch.name,
                base::kMaxMemberNameBytes));
  if (launch.bind.empty()) {
    if (!OnOneHost(launch)) launch.bind = AddressTowards(launch.coordinator_host, launch.coordinator_port);
    // Without a route yet (a name that resolves later), or on the coordinator's own host where its name means
    // loopback (Debian's 127.0.1.1), every interface is open: to holders of the key.
    if (launch.bind.empty() || (!OnOneHost(launch) && IsLoopback(launch.bind))) {
      launch.bind = OnOneHost(launch) ? "127.0.0.1" : "0.0.0.0";
    }
  } else if (!OnOneHost(launch) && IsLoopback(launch.bind)) {
    return absl::InvalidArgumentError(absl::StrCat(
        named.Name("ATOLL_BIND"), " ", launch.bind, " cannot be reached from the coordinator's host ",
        launch.coordinator_host, ": it should be an address or interface of the network"));
  }
  if (!launch.key.empty()) ATOLL_RETURN_IF_ERROR(CheckKey(launch.key));
  return base::CheckTlsOptions(launch.tls);
}

absl::StatusOr<Launch> LaunchFromEnvironment(const Environment& environment, const Naming& naming) {
  ATOLL_ASSIGN_OR_RETURN(Launch launch, ParseLaunch(environment, naming));
  ATOLL_RETURN_IF_ERROR(Finish(launch, naming));
  return launch;
}

absl::Status RequireOwnersAndWorkers(const Launch& launch) {
  if (launch.owners < 1) {
    return absl::InvalidArgumentError(
        "the job has no owner: --owners (ATOLL_OWNERS) should say how many of its ranks are owners, at least "
        "1");
  }
  if (launch.owners >= launch.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the job has no worker: --owners (ATOLL_OWNERS) is ", launch.owners,
                     ", as many as it has ranks; --workers, or "
                     "--world_size (WORLD_SIZE), should say that there are more"));
  }
  return absl::OkStatus();
}

}  // namespace Atoll::cluster
