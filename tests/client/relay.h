// A TCP relay on loopback that can stop in the middle of what the target sends, and cut.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace Atoll::client {

/// Thread-safe.
class Relay {
 public:
  explicit Relay(int target_port) : target_port_(target_port) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~Relay() {
    shutdown(listener_, SHUT_RDWR);
    acceptor_.join();
    Cut();
    for (std::thread& pump : pumps_) pump.join();
    for (int fd : fds_) close(fd);
    close(listener_);
  }

  int port() const { return port_; }
  /// From now on at most `bytes` more come from the target over each connection (a message's header and its
  /// tensors have their own); then it is as if the wire had no end.
  void HoldAfter(int64_t bytes) {
    absl::MutexLock lock(&mu_);
    limit_ = bytes;
    for (int64_t& passed : passed_) passed = 0;
  }
  /// Until those bytes were passed on over one of them.
  bool WaitHeld(absl::Duration limit) {
    absl::MutexLock lock(&mu_);
    auto held = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return in_flight_ == 0 && std::find(passed_.begin(), passed_.end(), limit_) != passed_.end();
    };
    return mu_.AwaitWithTimeout(absl::Condition(&held), limit);
  }
  /// Ends all connections; what was passed on still arrives.
  void Cut() {
    absl::MutexLock lock(&mu_);
    cut_ = true;
    for (int fd : fds_) shutdown(fd, SHUT_RDWR);
  }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }

  void Accept() {
    while (true) {
      const int from = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (from < 0) return;
      {
        absl::MutexLock lock(&mu_);
        fds_.push_back(from);
        if (cut_) shutdown(from, SHUT_RDWR);
        if (cut_) continue;
      }
      const int to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_in address = Loopback(target_port_);
      const bool there = connect(to, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
      absl::MutexLock lock(&mu_);
      fds_.push_back(to);
      if (!there) {  // The target has ended: whoever comes now sees that.
        shutdown(from, SHUT_RDWR);
        continue;
      }
      if (cut_) shutdown(to, SHUT_RDWR);
      int64_t* const passed = &passed_.emplace_back(0);
      pumps_.emplace_back([this, from, to] { Pump(from, to, nullptr); });
      pumps_.emplace_back([this, from, to, passed] { Pump(to, from, passed); });
    }
  }

  // How many of `bytes` may go on (Passed follows); waits while none may. 0: it was cut.
  int64_t Admit(int64_t bytes, int64_t* passed) {
    absl::MutexLock lock(&mu_);
    auto ready = [this, passed]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return cut_ || *passed < limit_; };
    mu_.Await(absl::Condition(&ready));
    if (cut_) return 0;
    const int64_t size = std::min(bytes, limit_ - *passed);
    *passed += size;
    in_flight_ += size;
    return size;
  }
  void Passed(int64_t bytes) {
    absl::MutexLock lock(&mu_);
    in_flight_ -= bytes;
  }

  static bool SendAll(int to, const char* data, int64_t size) {
    while (size > 0) {
      const ssize_t put = send(to, data, static_cast<size_t>(size), MSG_NOSIGNAL);
      if (put <= 0) return false;
      data += put;
      size -= put;
    }
    return true;
  }

  // `passed` counts what is limited; null: nothing is.
  void Pump(int from, int to, int64_t* passed) {
    std::vector<char> buffer(64 << 10);
    while (true) {
      const ssize_t got = recv(from, buffer.data(), buffer.size(), 0);
      if (got <= 0) break;
      for (int64_t done = 0; done < got;) {
        const int64_t size = passed != nullptr ? Admit(got - done, passed) : got - done;
        const bool sent = size > 0 && SendAll(to, buffer.data() + done, size);
        if (passed != nullptr) Passed(size);
        if (!sent) return;
        done += size;
      }
    }
    shutdown(to, SHUT_WR);
  }

  const int target_port_;
  int listener_ = -1, port_ = 0;
  std::thread acceptor_;
  absl::Mutex mu_;
  int64_t limit_ ABSL_GUARDED_BY(mu_) = INT64_MAX;
  std::list<int64_t> passed_ ABSL_GUARDED_BY(mu_);  // By connection.
  int64_t in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  bool cut_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<int> fds_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> pumps_ ABSL_GUARDED_BY(mu_);
};

}  // namespace Atoll::client
