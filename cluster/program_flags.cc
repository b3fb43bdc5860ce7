// The flags that the programs share, and the reading of command lines.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/cluster/program.h"

#ifndef ATOLL_VERSION
#error "the build defines ATOLL_VERSION"
#endif

ABSL_FLAG(
    std::string, rank, "",
    "this process's rank, from 0; owners come first. Instead of RANK; default: the launcher's, or 0 for an "
    "atoll-server that is started by hand");
ABSL_FLAG(
    std::string, world_size, "",
    "owners and workers together. Instead of WORLD_SIZE; default: --owners and --workers, or the launcher's");
ABSL_FLAG(std::string, owners, "", "how many ranks are owners. Instead of ATOLL_OWNERS");
ABSL_FLAG(std::string, workers, "", "how many ranks are workers; with --owners it makes --world_size");
ABSL_FLAG(
    std::string, coordinator, "",
    "HOST:PORT of rank 0 ([V6]:PORT for IPv6), which listens there. Instead of MASTER_ADDR and "
    "MASTER_PORT; default: 127.0.0.1:29500 where --workers or --world_size is given, else what the launcher "
    "says");
ABSL_FLAG(std::string, job, "",
          "the job's id: two jobs on one machine need two. Instead of ATOLL_JOB; default: from the "
          "launcher's id of "
          "its run, or atoll where there is none");
ABSL_FLAG(std::string, name, "",
          "this process's name, unique in the job. Instead of ATOLL_NAME; default owner0, "
          "worker0 ...");
ABSL_FLAG(
    std::string, bind, "",
    "address, host name or interface to listen on, without a port. Instead of ATOLL_BIND; default: loopback "
    "if the job is on one host");
ABSL_FLAG(std::string, key_file, "",
          "file with the job key, 16 to 4096 bytes, readable by you alone (chmod 600). Instead of "
          "ATOLL_KEY_FILE; default: on one host a key is made for the job");
ABSL_FLAG(
    std::string, tls, "",
    "TLS 1.3 on TCP: none, psk (keyed by the job key) or cert (a certificate on both sides). Instead of "
    "ATOLL_TLS; default none; the same for all processes of the job (docs/security.md)");
ABSL_FLAG(std::string, tls_cert, "",
          "with --tls=cert: PEM file of this process's certificate, then of those between it and the CA. "
          "Instead of ATOLL_TLS_CERT");
ABSL_FLAG(std::string, tls_key, "",
          "with --tls=cert: PEM file of its private key, readable by you alone (chmod 600). Instead of "
          "ATOLL_TLS_KEY");
ABSL_FLAG(
    std::string, tls_ca, "",
    "with --tls=cert: PEM file of the job's CA, from which every process has its certificate. Instead of "
    "ATOLL_TLS_CA");
ABSL_FLAG(std::string, join_limit, "",
          "how long to wait for the whole job to be there. Instead of "
          "ATOLL_JOIN_LIMIT; default 60s");
ABSL_FLAG(
    std::string, port, "",
    "port to listen on, or range such as 7000-7010, of which the first free one is taken; 0: the system "
    "chooses. For ranks other than 0, which listens at --coordinator. Instead of ATOLL_PORTS; default 0");
ABSL_FLAG(bool, unix_sockets, true, "use Unix sockets between processes of one host");
ABSL_FLAG(bool, cma, true, "copy memory between processes of one host directly");
ABSL_FLAG(absl::Duration, lease, absl::Seconds(10), "a process that is not heard of for so long is dead");
ABSL_FLAG(absl::Duration, grace, absl::Seconds(10),
          "time to end in order after SIGTERM, SIGINT or SIGHUP; then the process ends at once");
ABSL_FLAG(std::string, log_level, "",
          "debug, info, warning or error. Instead of ATOLL_LOG_LEVEL; default warning");

namespace Atoll::cluster {
namespace {

[[noreturn]] void UsageError(const ProgramText& text, absl::string_view message) {
  std::exit(EndWithError(text.name, absl::InvalidArgumentError(absl::StrCat(message, " (see --help)")),
                         kExitUsage));
}

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] != b[j - 1] ? 1 : 0);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

std::string NearestFlag(absl::string_view name) {
  std::string best;
  size_t best_distance = name.size() / 3 + 2;
  for (const auto& [known, flag] : absl::GetAllFlags()) {
    const size_t distance = EditDistance(name, known);
    if (distance < best_distance) best_distance = distance, best = std::string(known);
  }
  return best;
}

/// What the value of a flag that is not text should be.
absl::string_view KindOf(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<absl::Duration>()) return "a time, such as 500ms, 10s or 5m";
  if (flag.IsOfType<bool>()) return "true or false";
  if (flag.IsOfType<double>()) return "a number";
  return flag.IsOfType<uint64_t>() ? "a whole number, at least 0" : "a whole number";
}

/// `text` in lines of at most 100 characters, each after `indent` blanks.
std::string Wrap(absl::string_view text, size_t indent) {
  std::string out, line(indent, ' ');
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    if (line.size() > indent && line.size() + 1 + word.size() > 100) {
      absl::StrAppend(&out, line, "\n");
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    absl::StrAppend(&line, word);
  }
  return absl::StrCat(out, line, "\n");
}

void PrintHelp(const ProgramText& text) {
  std::map<std::string, std::map<std::string, const absl::CommandLineFlag*>> by_file;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    by_file[flag->Filename()][std::string(name)] = flag;
  }
  std::string out = text.help;
  for (const auto& [file, flags] : by_file) {
    static constexpr absl::string_view kOf[] = {"every Atoll program", "an owner", "a worker"};
    absl::StrAppend(&out, "\nFlags of ", kOf[static_cast<int>(FlagGroupOf(flags.begin()->first))], ":\n");
    for (const auto& [name, flag] : flags) {
      const std::string value = flag->DefaultValue();
      absl::StrAppend(&out, "  --", name);
      if (!value.empty()) absl::StrAppend(&out, "=", value);
      absl::StrAppend(&out, "\n", Wrap(flag->Help(), 6));
    }
  }
  absl::StrAppend(&out,
                  "\nExit codes: 0 done; 1 the job failed; 2 wrong flag, variable, file, model or data; "
                  "128+n ended by signal n.\n");
  PrintOut(out);
}

/// Which flag stands over which variable; errors name both.
constexpr struct {
  absl::string_view variable, flag;
} kFlagsOfVariables[] = {
    {"RANK", "rank"},
    {"WORLD_SIZE", "world_size"},
    {"MASTER_ADDR", "coordinator"},
    {"MASTER_PORT", "coordinator"},
    {"PET_MASTER_ADDR", "coordinator"},
    {"PET_MASTER_PORT", "coordinator"},
    {"ATOLL_OWNERS", "owners"},
    {"ATOLL_JOB", "job"},
    {"ATOLL_NAME", "name"},
    {"ATOLL_BIND", "bind"},
    {"ATOLL_PORTS", "port"},
    {"ATOLL_KEY_FILE", "key_file"},
    {"ATOLL_JOIN_LIMIT", "join_limit"},
    {"ATOLL_TLS", "tls"},
    {"ATOLL_TLS_CERT", "tls_cert"},
    {"ATOLL_TLS_KEY", "tls_key"},
    {"ATOLL_TLS_CA", "tls_ca"},
};

/// The environment with the flags laid over it, and which variables came from which flag.
class Overlay {
 public:
  explicit Overlay(const Environment& environment) : environment_(environment) {}
  void Set(absl::string_view variable, std::string value, absl::string_view flag) {
    if (value.empty()) return;
    values_[std::string(variable)] = std::move(value);
    if (!flag.empty()) flags_[std::string(variable)] = std::string(flag);
  }
  void Hide(absl::string_view variable) { values_[std::string(variable)] = std::nullopt; }
  std::optional<std::string> Get(absl::string_view variable) const {
    const auto found = values_.find(std::string(variable));
    return found != values_.end() ? found->second : environment_(variable);
  }
  /// What errors call a variable (Naming): the flag that gave it; "--rank (RANK)" where none did.
  std::string Name(absl::string_view variable) const {
    const auto given = flags_.find(std::string(variable));
    if (given != flags_.end()) return absl::StrCat("--", given->second);
    for (const auto& [known, flag] : kFlagsOfVariables) {
      if (known == variable) return absl::StrCat("--", flag, " (", variable, ")");
    }
    return std::string(variable);
  }

 private:
  const Environment& environment_;
  std::map<std::string, std::optional<std::string>> values_;
  std::map<std::string, std::string> flags_;
};

absl::Status SetCoordinator(Overlay* overlay) {
  const std::string coordinator = absl::GetFlag(FLAGS_coordinator);
  if (coordinator.empty()) return absl::OkStatus();
  const size_t colon = coordinator.rfind(':');
  std::string host = coordinator.substr(0, colon == std::string::npos ? 0 : colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  int port = 0;
  if (host.empty() || !absl::SimpleAtoi(coordinator.substr(colon + 1), &port) || port < 1 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--coordinator='", coordinator, "': it should be HOST:PORT, such as 127.0.0.1:29500"));
  }
  overlay->Set("MASTER_ADDR", host, "coordinator");
  overlay->Set("MASTER_PORT", absl::StrCat(port), "coordinator");
  overlay->Hide("TORCHELASTIC_USE_AGENT_STORE");
  return absl::OkStatus();
}

absl::Status SetWorld(Overlay* overlay) {
  overlay->Set("ATOLL_OWNERS", absl::GetFlag(FLAGS_owners), "owners");
  overlay->Set("WORLD_SIZE", absl::GetFlag(FLAGS_world_size), "world_size");
  overlay->Set("RANK", absl::GetFlag(FLAGS_rank), "rank");
  const std::string workers_text = absl::GetFlag(FLAGS_workers);
  int owners = 0, workers = 0, world = 0;
  if (!workers_text.empty()) {
    if (!absl::SimpleAtoi(workers_text, &workers) || workers < 1 || workers > 1 << 20) {
      return absl::InvalidArgumentError(absl::StrCat("--workers='", absl::CHexEscape(workers_text),
                                                     "': it should be a whole number, at least 1"));
    }
    const std::optional<std::string> owners_text = overlay->Get("ATOLL_OWNERS");
    if (!owners_text.has_value()) {
      return absl::InvalidArgumentError("--workers needs --owners (ATOLL_OWNERS) beside it");
    }
    if (!absl::SimpleAtoi(*owners_text, &owners) || owners < 1 || owners > 1 << 20) {
      return absl::InvalidArgumentError(absl::StrCat(overlay->Name("ATOLL_OWNERS"), "='",
                                                     absl::CHexEscape(*owners_text),
                                                     "': it should be a whole number, at least 1"));
    }
    const std::string world_text = absl::GetFlag(FLAGS_world_size);
    if (!world_text.empty() && (!absl::SimpleAtoi(world_text, &world) || world != owners + workers)) {
      return absl::InvalidArgumentError(absl::StrCat("--world_size=", world_text,
                                                     " contradicts --owners and "
                                                     "--workers, which make ",
                                                     owners + workers));
    }
    overlay->Set("WORLD_SIZE", absl::StrCat(owners + workers), "owners and --workers");
  }
  if (!absl::GetFlag(FLAGS_rank).empty() && !overlay->Get("WORLD_SIZE").has_value()) {
    return absl::InvalidArgumentError(
        "--rank needs to know of how many: --workers with --owners, or --world_size (WORLD_SIZE)");
  }
  // By hand, on one host, nothing but numbers needs to be given.
  const bool by_hand = !workers_text.empty() || !absl::GetFlag(FLAGS_world_size).empty();
  if (by_hand && !overlay->Get("MASTER_ADDR").has_value() && !overlay->Get("PET_MASTER_ADDR").has_value())
    overlay->Set("MASTER_ADDR", "127.0.0.1", "");
  return absl::OkStatus();
}

absl::Status SetLog(const Environment& environment) {
  std::string text = absl::GetFlag(FLAGS_log_level);
  const bool from_flag = !text.empty();
  if (!from_flag) text = environment("ATOLL_LOG_LEVEL").value_or("warning");
  base::LogLevel level;
  if (!base::ParseLogLevel(text, &level)) {
    return absl::InvalidArgumentError(absl::StrCat("--log_level", from_flag ? "" : " (ATOLL_LOG_LEVEL)", "='",
                                                   absl::CHexEscape(text),
                                                   "': it should be debug, info, warning or error"));
  }
  base::SetLogLevel(level);
  return absl::OkStatus();
}

/// Whether the process may have as many open files as its connections take: 14, and for each peer two pipes,
/// 4 over Unix sockets with cma, else 10. Without them it would seem that others do not come.
absl::Status CheckOpenFiles(const Launch& launch) {
  const int peers = launch.role == Role::kOwner ? launch.world_size - 1 : launch.owners;
  const bool few = OnOneHost(launch) && absl::GetFlag(FLAGS_unix_sockets) && absl::GetFlag(FLAGS_cma);
  const rlim_t needed = static_cast<rlim_t>(20 + (few ? 4 : 10) * peers);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= needed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the limit on open files (ulimit -n) is ", files.rlim_cur,
                                                 ": with ", peers, " peers ", launch.name, " needs ",
                                                 needed));
}

/// `use` gets the environment with the flags over it, and what its errors call the variables.
absl::Status WithOverlay(const Environment& environment, std::optional<Role> role,
                         const std::function<absl::Status(const Environment&, const Naming&)>& use) {
  ATOLL_RETURN_IF_ERROR(SetLog(environment));
  Overlay overlay(environment);
  ATOLL_RETURN_IF_ERROR(SetCoordinator(&overlay));
  ATOLL_RETURN_IF_ERROR(SetWorld(&overlay));
  if (role == Role::kOwner && overlay.Get("WORLD_SIZE").has_value() && !overlay.Get("RANK").has_value()) {
    overlay.Set("RANK", "0", "");  // The one owner of a job by hand.
  }
  overlay.Set("ATOLL_JOB", absl::GetFlag(FLAGS_job), "job");
  overlay.Set("ATOLL_NAME", absl::GetFlag(FLAGS_name), "name");
  overlay.Set("ATOLL_BIND", absl::GetFlag(FLAGS_bind), "bind");
  overlay.Set("ATOLL_PORTS", absl::GetFlag(FLAGS_port), "port");
  overlay.Set("ATOLL_JOIN_LIMIT", absl::GetFlag(FLAGS_join_limit), "join_limit");
  overlay.Set("ATOLL_TLS", absl::GetFlag(FLAGS_tls), "tls");
  overlay.Set("ATOLL_TLS_CERT", absl::GetFlag(FLAGS_tls_cert), "tls_cert");
  overlay.Set("ATOLL_TLS_KEY", absl::GetFlag(FLAGS_tls_key), "tls_key");
  overlay.Set("ATOLL_TLS_CA", absl::GetFlag(FLAGS_tls_ca), "tls_ca");
  if (!absl::GetFlag(FLAGS_key_file).empty()) {
    overlay.Set("ATOLL_KEY_FILE", absl::GetFlag(FLAGS_key_file), "key_file");
    overlay.Hide("ATOLL_KEY");
  }
  return use([&overlay](absl::string_view variable) { return overlay.Get(variable); },
             [&overlay](absl::string_view variable) { return overlay.Name(variable); });
}

}  // namespace

// By the file as the compiler was told it, whatever folder the tree is in.
FlagGroup FlagGroupOf(absl::string_view name) {
  const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  if (flag == nullptr) return FlagGroup::kWorker;
  const std::string file = flag->Filename();
  if (file == absl::GetFlagReflectionHandle(FLAGS_owners).Filename()) return FlagGroup::kCommon;
  return absl::EndsWith(file, "owner_flags_main.cc") ? FlagGroup::kOwner : FlagGroup::kWorker;
}

std::vector<std::string> ParseFlags(int argc, char** argv, const ProgramText& text) {
  std::vector<std::string> given;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h" || argument == "-help") {
      PrintHelp(text);
      std::exit(CheckOutput(text.name, kExitDone));
    }
    if (argument == "--version") {
      PrintOut(absl::StrCat(text.name, " ", ATOLL_VERSION, "\n"));
      std::exit(CheckOutput(text.name, kExitDone));
    }
    if (!absl::StartsWith(argument, "--") || argument.size() < 3) {
      UsageError(text, absl::StrCat("'", argument, "' is no flag: flags look like --name=value"));
    }
    const size_t equals = argument.find('=');
    std::string name(argument.substr(2, equals == absl::string_view::npos ? equals : equals - 2));
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    std::string value;
    if (equals != absl::string_view::npos) {
      value = std::string(argument.substr(equals + 1));
    } else if (flag != nullptr && flag->IsOfType<bool>()) {
      value = "true";
    } else if (flag == nullptr && absl::StartsWith(name, "no") &&
               absl::FindCommandLineFlag(name.substr(2)) != nullptr &&
               absl::FindCommandLineFlag(name.substr(2))->IsOfType<bool>()) {
      name = name.substr(2);
      flag = absl::FindCommandLineFlag(name);
      value = "false";
    } else if (flag != nullptr) {
      if (i + 1 >= argc)
        UsageError(text, absl::StrCat("--", name, " has no value: write --", name, "=VALUE"));
      value = argv[++i];
    }
    if (flag == nullptr) {
      const std::string nearest = NearestFlag(name);
      UsageError(text, absl::StrCat("there is no flag --", name,
                                    nearest.empty() ? "" : absl::StrCat("; did you mean --", nearest, "?")));
    }
    if (value.empty() && flag->IsOfType<std::string>()) {
      UsageError(text, absl::StrCat("--", name, " has an empty value: leave the flag out for its default"));
    }
    std::string error;
    if (!flag->ParseFrom(value, &error)) {
      UsageError(text,
                 absl::StrCat("--", name, "='", absl::CHexEscape(value), "': it should be ", KindOf(*flag)));
    }
    given.push_back(absl::StrCat("--", name, "=", value));
  }
  return given;
}

absl::StatusOr<Launch> PlacementFromFlags(const Environment& environment) {
  Launch launch;
  const auto read = [&](const Environment& laid, const Naming& naming) -> absl::Status {
    ATOLL_ASSIGN_OR_RETURN(launch, LaunchFromEnvironment(laid, naming));
    return RequireOwnersAndWorkers(launch);
  };
  ATOLL_RETURN_IF_ERROR(WithOverlay(environment, std::nullopt, read));
  return launch;
}

absl::StatusOr<FlaggedLaunch> LaunchFromFlags(std::optional<Role> role, const Environment& environment) {
  FlaggedLaunch flagged;
  const auto read = [&](const Environment& laid, const Naming& naming) -> absl::Status {
    ATOLL_ASSIGN_OR_RETURN(flagged.launch, LaunchFromEnvironment(laid, naming));
    const Launch& launch = flagged.launch;
    ATOLL_RETURN_IF_ERROR(RequireOwnersAndWorkers(launch));
    if (role.has_value() && launch.role != *role) {
      return absl::InvalidArgumentError(
          absl::StrCat(naming("RANK"), "=", launch.rank, " is ",
                       launch.role == Role::kOwner ? "an owner's" : "a worker's", ": owners are ranks 0 to ",
                       launch.owners - 1, ", workers ", launch.owners, " to ", launch.world_size - 1,
                       launch.role == Role::kOwner ? "; atoll-server is the program of owners"
                                                   : "; atoll-worker is the program of workers"));
    }
    ATOLL_ASSIGN_OR_RETURN(flagged.key_file, EnsureJobKey(flagged.launch, laid));
    return CheckOpenFiles(launch);
  };
  ATOLL_RETURN_IF_ERROR(WithOverlay(environment, role, read));
  base::SetLogName(flagged.launch.name);
  return flagged;
}

absl::StatusOr<NodeFlags> NodeFlagsFromFlags() {
  NodeFlags flags;
  flags.enable_unix = absl::GetFlag(FLAGS_unix_sockets);
  flags.enable_cma = absl::GetFlag(FLAGS_cma);
  flags.lease = absl::GetFlag(FLAGS_lease);
  flags.grace = absl::GetFlag(FLAGS_grace);
  if (flags.lease < absl::Milliseconds(500) || flags.lease > absl::Hours(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lease=", absl::FormatDuration(flags.lease), ": it should be from 500ms to 1h"));
  }
  if (flags.grace < absl::ZeroDuration() || flags.grace > absl::Hours(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--grace=", absl::FormatDuration(flags.grace), ": it should be from 0 to 1h"));
  }
  return flags;
}

}  // namespace Atoll::cluster
