// Bare sockets for tests that are not polite.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "atoll/base/ids.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/handshake_core.h"
#include "atoll/transport/socket.h"

namespace Atoll::transport::testing {

inline constexpr int kPollMs = 60000;

/// A blocking connection.
class RawSocket {
 public:
  explicit RawSocket(const std::string& address) {
    auto parsed = ParseAddress(address);
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    fd_ = Fd(socket(parsed->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    connected_ = fd_.valid() && connect(fd_.get(), parsed->raw(), parsed->size) == 0;
  }
  explicit RawSocket(Fd fd) : fd_(std::move(fd)), connected_(true) {
    fcntl(fd_.get(), F_SETFL, fcntl(fd_.get(), F_GETFL) & ~O_NONBLOCK);
  }
  bool connected() const { return connected_; }
  /// False once the peer has closed.
  bool Send(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(sent);
    }
    return true;
  }
  /// Up to `bytes`; fewer only if the peer closed.
  std::string Receive(size_t bytes) {
    std::string result(bytes, '\0');
    size_t got = 0;
    while (got < bytes) {
      pollfd wait{fd_.get(), POLLIN, 0};
      if (poll(&wait, 1, kPollMs) <= 0) {
        ADD_FAILURE() << "nothing came";
        break;
      }
      const ssize_t one = recv(fd_.get(), &result[got], bytes - got, 0);
      if (one <= 0) break;
      got += one;
    }
    result.resize(got);
    return result;
  }
  /// True when the peer has closed, whatever it sent before.
  bool SeesTheEnd() {
    while (true) {
      pollfd wait{fd_.get(), POLLIN, 0};
      if (poll(&wait, 1, kPollMs) <= 0) return false;
      char sink[4096];
      if (recv(fd_.get(), sink, sizeof(sink), 0) <= 0) return true;
    }
  }
  /// Nothing has come, and the peer has not closed.
  bool Open() const {
    char byte;
    return recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  }
  void Close() { fd_.reset(); }
  int fd() const { return fd_.get(); }

  /// A frame as Stream sends it.
  static std::string Frame(absl::string_view bytes) {
    const uint64_t length = bytes.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + std::string(bytes.data(), bytes.size());
  }
  /// Empty if the peer closed.
  std::string ReceiveFrame() {
    const std::string head = Receive(8);
    if (head.size() < 8) return "";
    uint64_t length;
    std::memcpy(&length, head.data(), 8);
    return Receive(length);
  }

  /// Runs `handshake` to its end. False if it failed or the peer closed.
  bool Greet(Handshake& handshake) {
    while (true) {
      Send(handshake.TakeOutput());
      if (!handshake.status().ok()) return false;
      if (handshake.finished()) return true;
      const std::string bytes = Receive(std::min<size_t>(handshake.wanted(), 1 << 12));
      if (bytes.empty()) return false;
      handshake.Feed(bytes);
    }
  }

 private:
  Fd fd_;
  bool connected_ = false;
};

/// A listener that speaks only when told.
class RawListener {
 public:
  explicit RawListener(Way way) {
    if (way == Way::kUnix) {
      address_ = UnixAddressOf("raw", {"listener", base::NewIncarnation()});
      fd_ = *ListenUnix(address_);
    } else {
      fd_ = *ListenTcp(*ResolveBind(way == Way::kTcp6 ? "::1" : "127.0.0.1"), {}, &address_);
    }
  }
  std::string address() const { return address_.ToString(); }
  Fd Accept() {
    pollfd wait{fd_.get(), POLLIN, 0};
    if (poll(&wait, 1, kPollMs) <= 0) return Fd();
    return Fd(accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

 private:
  SocketAddress address_;
  Fd fd_;
};

}  // namespace Atoll::transport::testing
