// What the programs atoll-server, atoll-worker and atoll-run have in common: their flags, how they take
// signals, and how they end. Only their `main`s use it: a user's own job needs none of it, and the library
// `cluster` does not contain it (its flags would appear in every program that links the library).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/cluster/job_key.h"
#include "atoll/cluster/launch.h"

namespace Atoll::cluster {

/// How a program of ours ends; docs/exit_codes.md is for users. After a signal n that ended it in order, or
/// the second one that ended it at once: 128 + n.
enum ExitCode : int {
  kExitDone = 0,    ///< What was asked for is done.
  kExitFailed = 1,  ///< The job could not start or broke: the line on standard error says why.
  kExitUsage = 2,   ///< Never begun: a flag, variable, file, model or data set is wrong. Nothing to retry.
};

struct ProgramText {
  std::string name;  ///< "atoll-server"
  std::string help;  ///< What it is for, examples, environment; the flags are listed behind it.
};

/// What main does first: blocks the signals that SignalWatch takes (every later thread inherits that),
/// ignores SIGPIPE, takes as many open files as the process may have, keeps the numbers of closed standard
/// streams from going to sockets, and glibc from hoarding freed buffers.
void SetUpProcess();

/// Reads the command line into the Abseil flags that the program links. `--help` and `--version` answer on
/// standard output and end the process with 0; an unknown flag (with the nearest known one), a value that
/// does not parse, or an argument that is no flag is one line on standard error and kExitUsage. Returns the
/// flags that were given, as "--name=value". (absl::ParseCommandLine ends with 1 for all of these.)
std::vector<std::string> ParseFlags(int argc, char** argv, const ProgramText& text);

/// Who has a flag, by the file that defines it: program_flags.cc, server/owner_flags_main.cc, or a worker's.
enum class FlagGroup { kCommon, kOwner, kWorker };
FlagGroup FlagGroupOf(absl::string_view name);

/// The launch that the flags and, where they are silent, the environment describe; `role` (null: any) is what
/// the program can be. Errors name the flag, and the variable too where the flag was not
/// given. Sets the log's level and name.
struct FlaggedLaunch {
  Launch launch;
  std::unique_ptr<SharedKeyFile> key_file;  ///< Keep it while members may join; may be null.
};
absl::StatusOr<FlaggedLaunch> LaunchFromFlags(std::optional<Role> role,
                                              const Environment& environment = ProcessEnvironment());

/// The launch alone, without a key: what atoll-run needs.
absl::StatusOr<Launch> PlacementFromFlags(const Environment& environment = ProcessEnvironment());

/// Flags for layers above this one.
struct NodeFlags {
  bool enable_unix = true;
  bool enable_cma = true;
  absl::Duration lease = absl::Seconds(10);
  absl::Duration grace = absl::Seconds(10);
};
absl::StatusOr<NodeFlags> NodeFlagsFromFlags();

/// Writes `text` to standard output at once.
void PrintOut(absl::string_view text);
/// `code`; but kExitFailed instead of kExitDone, and a line on standard error, where PrintOut could not write.
int CheckOutput(absl::string_view who, int code);

/// The code for an error of joining the job: kExitUsage where what was given is wrong (InvalidArgument: a --bind
/// that is no address of this host), or else kExitFailed.
ExitCode CodeOfStart(const absl::Status& error);

/// Says on standard error, in one line, why the program `who` ("atoll-worker worker1") ends, tells torchrun
/// too, and returns `code`.
int EndWithError(absl::string_view who, const absl::Status& error, ExitCode code);

/// A thread that waits for SIGTERM, SIGINT and SIGHUP, which SetUpProcess has blocked; not for those that
/// the process was started to ignore (nohup). The first asks for an end in order; a second, or `grace` without
/// an end, ends the process at once with 128 + its number. One a process.
class SignalWatch {
 public:
  /// Until OnSignal is called a first signal ends the process at once: there is nothing to put in order yet.
  SignalWatch(std::string who, absl::Duration grace);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  /// `ask` runs once, on the watch's thread and under no lock, with the first signal; it must be short (no
  /// other signal is seen meanwhile), and what it uses must outlive the watch, or the next OnSignal. Replaces
  /// an earlier one, and waits until that has run. Not to be called from `ask`.
  void OnSignal(std::function<void(int)> ask);
  /// The first signal, or 0.
  int signal() const { return signal_.load(std::memory_order_acquire); }
  /// What main returns: 128 + signal if one came, or else `code`, with CheckOutput.
  int ExitWith(int code) const { return signal() != 0 ? 128 + signal() : CheckOutput(who_, code); }

 private:
  void Run();

  const std::string who_;
  const absl::Duration grace_;
  int signal_fd_ = -1;
  int stop_fd_ = -1;
  std::atomic<int> signal_{0};
  absl::Mutex mu_;
  std::function<void(int)> ask_ ABSL_GUARDED_BY(mu_);
  bool asking_ ABSL_GUARDED_BY(mu_) = false;  // It runs.
  std::thread thread_;
};

/// "SIGTERM" and so on.
std::string SignalName(int signal);

}  // namespace Atoll::cluster
