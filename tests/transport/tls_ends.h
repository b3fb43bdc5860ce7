// Both ends of TLS on a socket pair, driven by hand.
#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "atoll/tests/transport/testing.h"
#include "atoll/transport/socket.h"
#include "atoll/transport/tls.h"

namespace Atoll::transport::testing {

inline std::string Message(const absl::Status& status) { return std::string(status.message()); }

inline base::TlsOptions PskOptions() {
  base::TlsOptions options;
  options.mode = base::TlsMode::kPsk;
  return options;
}

inline std::shared_ptr<TlsContext> ContextOf(const base::TlsOptions& options, const std::string& key = kKey) {
  auto context = TlsContext::Create(options, key);
  EXPECT_TRUE(context.ok()) << context.status();
  return *context;
}

/// One end of a socket pair, driven by hand.
struct End {
  End(std::shared_ptr<TlsContext> context, Tls::Side side, Fd fd)
      : fd(std::move(fd)), tls(std::move(context), side, &traffic) {}
  /// All that is there, at most `max_bytes`.
  std::string Take(size_t max_bytes = 1 << 20) {
    std::string bytes(max_bytes, '\0');
    const iovec into{bytes.data(), bytes.size()};
    const ssize_t got = tls.Receive(fd.get(), &into, 1);
    result = got;
    error = got < 0 ? errno : 0;
    bytes.resize(std::max<ssize_t>(got, 0));
    return bytes;
  }
  ssize_t Put(absl::string_view bytes) {
    const iovec from{const_cast<char*>(bytes.data()), bytes.size()};
    return tls.Send(fd.get(), &from, 1);
  }
  Fd fd;
  Traffic traffic;
  Tls tls;
  ssize_t result = 0;
  int error = 0;
};

struct Ends {
  Ends(std::shared_ptr<TlsContext> client_context, std::shared_ptr<TlsContext> server_context) {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    client = std::make_unique<End>(std::move(client_context), Tls::Side::kClient, Fd(fds[0]));
    server = std::make_unique<End>(std::move(server_context), Tls::Side::kServer, Fd(fds[1]));
  }
  /// To the end of the handshake, or to a failure that both have heard of.
  void Greet() {
    for (int i = 0; i < 6; ++i) {
      if (client_status.ok()) client_status = client->tls.Handshake(client->fd.get());
      if (server_status.ok()) server_status = server->tls.Handshake(server->fd.get());
    }
    if (client_status.ok() && !server_status.ok()) {
      client->Take();
      client_status = client->tls.failure();
    }
  }
  std::unique_ptr<End> client, server;
  absl::Status client_status, server_status;
};

}  // namespace Atoll::transport::testing
