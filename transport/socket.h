// Sockets: addresses in and out of text, descriptors that close themselves, and listening. Everything is
// non-blocking and close-on-exec. No state, any thread.
#pragma once

#include <sys/socket.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/base/ids.h"

namespace Atoll::transport {

/// Owns a descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

/// An IPv4, IPv6 or abstract Unix address.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  /// 0 for a Unix address.
  int port() const;
  void set_port(int port);
  /// "127.0.0.1:4711", "[::1]:4711" or "unix:@name": what ParseAddress takes.
  std::string ToString() const;
};

/// Parses what SocketAddress::ToString writes. NotFound: "host:port" with a host that is no literal and
/// needs ResolveAddress; InvalidArgument: not an address at all.
absl::StatusOr<SocketAddress> ParseAddress(absl::string_view text);
/// As ParseAddress, and asks the system's resolver for a host name, which may take seconds.
absl::StatusOr<std::vector<SocketAddress>> ResolveAddress(absl::string_view text);

/// The addresses to bind (port 0), best first, for a literal, an interface's name or a host name; only a host
/// name has several. InvalidArgument lists what this machine has.
absl::StatusOr<std::vector<SocketAddress>> ResolveBind(absl::string_view text);
/// This machine's addresses of `family` that mean the same elsewhere, and loopback.
std::vector<SocketAddress> LocalAddresses(int family);
/// Whether it leads to the host that uses it: 127.0.0.0/8 and ::1, also as IPv4 in IPv6.
bool IsLoopback(const SocketAddress& address);
bool IsWildcard(const SocketAddress& address);
/// Where a wildcard bind is reached, `local` being this machine's addresses: at most `max_count`, none of
/// loopback unless there are no others, with the port of `bound`.
std::vector<SocketAddress> Reachable(const SocketAddress& bound, std::vector<SocketAddress> local,
                                     size_t max_count);

/// The abstract Unix address of a member of a job: readable where the names allow it, hashed where they are
/// too long or have odd characters.
SocketAddress UnixAddressOf(absl::string_view job, const base::MemberId& member);

/// The ports of [first, first + count), tried in order.
struct PortRange {
  int first = 0;  ///< 0: the system chooses one.
  int count = 1;
  int last_resort = 0;  ///< One of them that is taken only if no other is free; 0: none.
};
/// A listening socket on the first free port of the first of `candidates` that is an address of this machine, which
/// becomes `bound`. FailedPrecondition names the ports tried, and why not; InvalidArgument: no address is ours.
absl::StatusOr<Fd> ListenTcp(const std::vector<SocketAddress>& candidates, const PortRange& ports,
                             SocketAddress* bound);
absl::StatusOr<Fd> ListenUnix(const SocketAddress& address);

/// That the system gave no descriptor, as base::ErrnoStatus; where the process has its fill it says how many that is,
/// and how many are needed.
absl::Status DescriptorError(int error_number, absl::string_view what);
/// "the limit on open files (ulimit -n) is 128: ..."
std::string DescriptorsNeeded();

/// Why a connect failed: Unavailable, which IsRefused where nobody listens.
absl::Status ConnectError(int error_number);
/// A socket whose connect has begun (it may even be done).
absl::StatusOr<Fd> StartConnect(const SocketAddress& address);
/// Sets what connected sockets need (TCP_NODELAY), and checks of a Unix socket that the process at the
/// other end has our user id (PermissionDenied).
absl::Status PrepareConnected(int fd, int family);

}  // namespace Atoll::transport
