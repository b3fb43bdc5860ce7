// The processes that storm_test.cc kills, and what its own holds.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_join.h"
#include "agent_fixture.h"
#include "storm_shared.h"

namespace Atoll::rpc {

/// A process that was forked for a test. Signals reach it and no other that has its number later.
class Victim {
 public:
  Victim(pid_t pid, Peer peer, std::string failure)
      : pid_(pid),
        peer_(std::move(peer)),
        failure_(std::move(failure)),
        pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
    EXPECT_TRUE(pidfd_ >= 0 || !failure_.empty());
  }
  Victim(Victim&& other) noexcept
      : pid_(other.pid_),
        peer_(std::move(other.peer_)),
        failure_(std::move(other.failure_)),
        pidfd_(std::exchange(other.pidfd_, -1)) {}
  ~Victim() {
    if (pidfd_ < 0) return;
    Kill();
    close(pidfd_);
  }
  void Signal(int number) { syscall(SYS_pidfd_send_signal, pidfd_, number, nullptr, 0); }
  /// Returns when it has ended.
  void Kill() {
    Signal(SIGKILL);
    pollfd end{pidfd_, POLLIN, 0};
    EXPECT_EQ(poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(kHang))), 1);
  }
  const Peer& peer() const { return peer_; }
  /// Why it did not start; empty if it did.
  const std::string& failure() const { return failure_; }
  size_t descriptors() const {
    size_t count = 0;
    std::error_code error;
    for (const auto& each : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid_, "/fd"), error))
      count += !!&each;
    return count;
  }

 private:
  pid_t pid_;
  Peer peer_;
  std::string failure_;
  int pidfd_;
};

/// The process that victims are forked from, since it takes long to load all anew for each.
class Nursery {
 public:
  Nursery() {
    std::string helper = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "rpc_storm_peer";
    const int marks = memfd_create("storm", 0);  // Inherited.
    EXPECT_EQ(ftruncate(marks, kStormCalls), 0);
    marks_ = static_cast<std::atomic<uint8_t>*>(
        mmap(nullptr, kStormCalls, PROT_READ | PROT_WRITE, MAP_SHARED, marks, 0));
    int in[2], out[2];
    EXPECT_EQ(pipe2(in, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    std::string number = absl::StrCat(marks);
    char* arguments[] = {helper.data(), number.data(), nullptr};
    EXPECT_EQ(posix_spawn(&pid_, helper.c_str(), &actions, nullptr, arguments, environ), 0) << helper;
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    close(marks);
    to_ = in[1];
    from_ = fdopen(out[0], "r");
  }
  ~Nursery() {
    close(to_);
    waitpid(pid_, nullptr, 0);
    fclose(from_);
    munmap(marks_, kStormCalls);
  }

  Victim Spawn(const StormVictim& spec) {
    const std::string order = absl::StrCat(spec.way, " ", spec.name, " ", spec.descriptors, " ", spec.pushes,
                                           " ", spec.peer.id.name, " ", spec.peer.id.incarnation.value(), " ",
                                           absl::StrJoin(spec.peer.addresses, " "), "\n");
    EXPECT_EQ(write(to_, order.data(), order.size()), static_cast<ssize_t>(order.size()));
    char line[4096] = "";
    EXPECT_NE(fgets(line, sizeof(line), from_), nullptr);
    std::istringstream words(line);
    pid_t pid = 0;
    uint64_t incarnation = 0;
    words >> pid >> incarnation;
    Peer peer{{spec.name, base::Incarnation(incarnation)}, {}};
    for (std::string address; words >> address;) peer.addresses.push_back(address);
    std::string failure = incarnation == 0 ? absl::StrJoin(peer.addresses, " ") : "";
    return Victim(pid, std::move(peer), std::move(failure));
  }
  /// How often the call of this number ran.
  int Marks(int id) const { return marks_[id].load(); }

 private:
  std::atomic<uint8_t>* marks_ = nullptr;
  pid_t pid_ = 0;
  int to_ = -1;
  FILE* from_ = nullptr;
};

/// What this process holds.
struct Holding {
  size_t descriptors = 0, threads = 0, shared_maps = 0;
  int64_t resident_kib = 0, locked_kib = 0;

  static Holding Now() {
    Holding now;
    for (const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) now.descriptors += !!&each;
    for (const auto& each : std::filesystem::directory_iterator("/proc/self/task")) now.threads += !!&each;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
      now.shared_maps +=
          line.find("/dev/shm/") != std::string::npos || line.find("memfd:") != std::string::npos;
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
      if (word == "VmRSS:") status >> now.resident_kib;
      if (word == "VmLck:") status >> now.locked_kib;
    }
    return now;
  }
};

}  // namespace Atoll::rpc
