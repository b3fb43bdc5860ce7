#include "atoll/cluster/program.h"

#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/clock.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"
#include "atoll/cluster/agent_store.h"

namespace Atoll::cluster {
namespace {

// But not what our parent had us ignore (nohup).
sigset_t EndingSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) {
    struct sigaction now;
    if (sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN) continue;
    sigaddset(&set, signal);
  }
  return set;
}

// Standard output is one a process; the first errno that writing to it gave.
std::atomic<int> g_output_error{0};

/// A closed standard stream's number would go to the next socket, and what is printed into that. What is opened
/// instead refuses to be used, as a closed one does.
void KeepStandardStreams() {
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

/// Ends the process without destructors: other threads are in the middle of things.
[[noreturn]] void EndAtOnce(absl::string_view who, absl::string_view why, int signal) {
  const std::string line = absl::StrCat(who, ": ", why, "\n");
  (void)!write(STDERR_FILENO, line.data(), line.size());
  _exit(128 + signal);
}

}  // namespace

void PrintOut(absl::string_view text) {
  const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) == 0 && written) return;
  int none = 0;
  g_output_error.compare_exchange_strong(none, errno);
}

int CheckOutput(absl::string_view who, int code) {
  const int error = g_output_error.load();
  if (error == 0 || code != kExitDone) return code;
  return EndWithError(who, base::ErrnoStatus(error, "cannot write to standard output"), kExitFailed);
}

void SetUpProcess() {
  KeepStandardStreams();
  const sigset_t set = EndingSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
  rlimit files{};  // The soft limit is low for the sake of select(), which nothing here uses.
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  // By itself glibc raises the threshold with each large buffer that is freed, up to 32 MiB, and then keeps
  // freed gradients in the heap. A fixed threshold gives large ones back and still reuses what a step
  // allocates again and again.
  mallopt(M_MMAP_THRESHOLD, 8 << 20);
  mallopt(M_TRIM_THRESHOLD, 64 << 20);
  // Debian's Abseil is built with assertions, and then looks for deadlocks at every lock: a fifth of the time of
  // small calls (docs/benchmarks.md). The tests keep it on.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}

int EndWithError(absl::string_view who, const absl::Status& error, ExitCode code) {
  // Without its payloads: whether some call ran says nothing to who started a program.
  const std::string message = base::ErrorText(absl::Status(error.code(), error.message()));
  const std::string line = absl::StrCat(who, ": error: ", message, "\n");
  (void)!write(STDERR_FILENO, line.data(), line.size());
  const absl::Status told = WriteTorchElasticError(absl::StrCat(who, ": ", message));
  if (!told.ok()) ATOLL_LOG(kWarning) << "torchrun is not told: " << base::ErrorText(told);
  return code;
}

ExitCode CodeOfStart(const absl::Status& error) {
  return absl::IsInvalidArgument(error) ? kExitUsage : kExitFailed;
}

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? absl::StrCat("signal ", signal) : absl::StrCat("SIG", name);
}

SignalWatch::SignalWatch(std::string who, absl::Duration grace) : who_(std::move(who)), grace_(grace) {
  const sigset_t set = EndingSignals();
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC);
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  ATOLL_CHECK(signal_fd_ >= 0 && stop_fd_ >= 0) << "no descriptor for signals: " << strerror(errno);
  thread_ = std::thread([this] { Run(); });
}

SignalWatch::~SignalWatch() {
  const uint64_t one = 1;
  (void)!write(stop_fd_, &one, sizeof(one));
  thread_.join();
  close(signal_fd_);
  close(stop_fd_);
}

void SignalWatch::OnSignal(std::function<void(int)> ask) {
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(
      +[](SignalWatch* self) ABSL_SHARED_LOCKS_REQUIRED(self->mu_) { return !self->asking_; }, this));
  ask_ = std::move(ask);
}

void SignalWatch::Run() {
  pthread_setname_np(pthread_self(), "signals");
  absl::Time give_up = absl::InfiniteFuture();
  while (true) {
    pollfd fds[2] = {{signal_fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
    int timeout = -1;
    if (give_up != absl::InfiniteFuture()) {
      timeout = static_cast<int>(std::max<int64_t>(
          0, absl::ToInt64Milliseconds(absl::Ceil(give_up - base::Now(), absl::Milliseconds(1)))));
    }
    const int ready = poll(fds, 2, timeout);
    if (ready < 0 && errno == EINTR) continue;
    if (fds[1].revents != 0) return;
    if (ready == 0) {
      EndAtOnce(who_,
                absl::StrCat(SignalName(signal()),
                             ": not ended within --grace=", absl::FormatDuration(grace_), ": ending at once"),
                signal());
    }
    signalfd_siginfo info;
    if (read(signal_fd_, &info, sizeof(info)) != sizeof(info)) continue;
    const int number = static_cast<int>(info.ssi_signo);
    if (signal() != 0) {
      EndAtOnce(who_, absl::StrCat(SignalName(number), " again: ending at once"), number);
    }
    std::function<void(int)> ask;
    {
      absl::MutexLock lock(&mu_);
      ask = ask_;
      asking_ = true;
    }
    if (!ask) EndAtOnce(who_, absl::StrCat(SignalName(number), " before the job began: ending"), number);
    signal_.store(number, std::memory_order_release);
    give_up = base::Now() + grace_;
    const std::string line = absl::StrCat(who_, ": ", SignalName(number), ": ending in order\n");
    (void)!write(STDERR_FILENO, line.data(), line.size());
    ask(number);
    absl::MutexLock lock(&mu_);
    asking_ = false;
  }
}

}  // namespace Atoll::cluster
