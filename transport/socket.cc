#include "atoll/transport/socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/sha.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "atoll/base/status.h"
#include "atoll/transport/refusal.h"

namespace Atoll::transport {
namespace {

constexpr absl::string_view kUnixPrefix = "unix:@";

SocketAddress UnixAddress(absl::string_view name) {
  SocketAddress address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
  un->sun_family = AF_UNIX;
  std::memcpy(un->sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

std::optional<SocketAddress> ParseHost(absl::string_view host) {
  SocketAddress address;
  const std::string text(host);
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    address.size = sizeof(sockaddr_in);
    return address;
  }
  // getaddrinfo, because it knows scopes ("fe80::1%eth0").
  if (host.find(':') == absl::string_view::npos) return std::nullopt;
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_family = AF_INET6;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(text.c_str(), nullptr, &hints, &found) != 0) return std::nullopt;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  freeaddrinfo(found);
  return address;
}

struct HostPort {
  std::string host;
  int port = 0;
};

absl::StatusOr<HostPort> SplitHostPort(absl::string_view text) {
  absl::string_view host, port;
  const size_t colon = text.rfind(':');
  if (colon != absl::string_view::npos) {
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
  }
  if (absl::ConsumePrefix(&host, "[") && !absl::ConsumeSuffix(&host, "]")) host = "";
  HostPort result;
  if (host.empty() || !absl::SimpleAtoi(port, &result.port) || result.port < 1 || result.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", absl::CHexEscape(text), "' is not an address: host:port, [v6]:port or unix:@name"));
  }
  result.host = std::string(host);
  return result;
}

std::vector<SocketAddress> LookUp(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  std::vector<SocketAddress> result;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return result;
  for (addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
    result.push_back(address);
  }
  freeaddrinfo(found);
  return result;
}

struct Interface {
  std::string name;
  SocketAddress address;
};

std::vector<Interface> Interfaces() {
  std::vector<Interface> result;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return result;
  for (ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Interface one;
    one.name = entry->ifa_name;
    one.address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&one.address.storage, entry->ifa_addr, one.address.size);
    result.push_back(one);
  }
  freeifaddrs(list);
  return result;
}

std::string HostText(const SocketAddress& address) {
  char host[NI_MAXHOST];
  if (getnameinfo(address.raw(), address.size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0)
    return "?";
  return host;
}

std::string DescribeInterfaces() {
  std::vector<std::string> texts;
  for (const Interface& one : Interfaces())
    texts.push_back(absl::StrCat(one.name, " ", HostText(one.address)));
  return absl::StrJoin(texts, ", ");
}

/// Why a port could not be had: an errno.
using Refused = std::map<int, int>;

std::vector<int> InOrder(const PortRange& ports) {
  std::vector<int> order;
  bool last = false;
  for (int port = ports.first; port < ports.first + (ports.first == 0 ? 1 : ports.count); ++port) {
    const bool resort = port != 0 && port == ports.last_resort;
    last |= resort;
    if (!resort) order.push_back(port);
  }
  if (last) order.push_back(ports.last_resort);
  return order;
}

/// "port 80: not permitted", "ports 7000 to 7003: in use", or "ports 1023 to 1025: 1023 not permitted, 1024 to
/// 1025 in use".
std::string DescribeRefused(const PortRange& ports, const Refused& refused) {
  struct Run {
    int first, last;
    std::string why;
  };
  auto text_of = [](int first, int last) {
    return first == last ? absl::StrCat(first) : absl::StrCat(first, " to ", last);
  };
  std::vector<Run> runs;
  for (const auto& [port, error] : refused) {
    const std::string why = error == EADDRINUSE ? "in use"
                            : error == EACCES   ? "not permitted"
                                                : std::string(base::ErrnoStatus(error, "bind").message());
    if (runs.empty() || runs.back().why != why) runs.push_back({port, port, why});
    runs.back().last = port;
  }
  const int count = ports.first == 0 ? 1 : ports.count;
  const std::string all =
      absl::StrCat(count == 1 ? "port " : "ports ", text_of(ports.first, ports.first + count - 1), ": ");
  if (runs.size() == 1) return absl::StrCat(all, runs.front().why);
  return absl::StrCat(all, absl::StrJoin(runs, ", ", [&](std::string* out, const Run& run) {
                        absl::StrAppend(out, text_of(run.first, run.last), " ", run.why);
                      }));
}

/// Listens on `address`, which becomes what is bound; else an invalid one, and why.
Fd TryToListen(SocketAddress* address, int* error) {
  Fd fd(socket(address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (fd.valid()) {
    const int on = 1, off = 0;
    setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (address->family() == AF_INET6) {
      // "::" serves IPv4 too; a specific address only itself.
      const int* only = IsWildcard(*address) ? &off : &on;
      setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, only, sizeof(*only));
    }
    socklen_t size = sizeof(address->storage);
    if (bind(fd.get(), address->raw(), address->size) == 0 && listen(fd.get(), SOMAXCONN) == 0 &&
        getsockname(fd.get(), address->raw(), &size) == 0) {
      address->size = size;
      return fd;
    }
  }
  *error = errno;
  return Fd();
}

}  // namespace

void Fd::reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

int SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
  if (family() == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
  return 0;
}

void SocketAddress::set_port(int port) {
  if (family() == AF_INET) reinterpret_cast<sockaddr_in*>(&storage)->sin_port = htons(port);
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = htons(port);
}

std::string SocketAddress::ToString() const {
  if (family() == AF_UNIX) {
    const auto* un = reinterpret_cast<const sockaddr_un*>(&storage);
    const size_t prefix = offsetof(sockaddr_un, sun_path) + 1;
    if (size <= prefix) return "unix:";
    return absl::StrCat(kUnixPrefix, absl::string_view(un->sun_path + 1, size - prefix));
  }
  if (family() == AF_INET6) return absl::StrCat("[", HostText(*this), "]:", port());
  if (family() == AF_INET) return absl::StrCat(HostText(*this), ":", port());
  return "?";
}

absl::StatusOr<SocketAddress> ParseAddress(absl::string_view text) {
  if (absl::ConsumePrefix(&text, kUnixPrefix)) {
    if (text.empty() || text.size() > sizeof(sockaddr_un::sun_path) - 1) {
      return absl::InvalidArgumentError("the name of a Unix socket has 1 to 107 bytes");
    }
    return UnixAddress(text);
  }
  absl::StatusOr<HostPort> split = SplitHostPort(text);
  if (!split.ok()) return split.status();
  std::optional<SocketAddress> address = ParseHost(split->host);
  if (!address.has_value()) return absl::NotFoundError(absl::StrCat("'", split->host, "' is a host name"));
  address->set_port(split->port);
  return *address;
}

absl::StatusOr<std::vector<SocketAddress>> ResolveAddress(absl::string_view text) {
  absl::StatusOr<SocketAddress> literal = ParseAddress(text);
  if (literal.ok()) return std::vector<SocketAddress>{*literal};
  if (!absl::IsNotFound(literal.status())) return literal.status();
  HostPort split = *SplitHostPort(text);
  std::vector<SocketAddress> found = LookUp(split.host, AI_ADDRCONFIG);
  if (const size_t scope = split.host.find('%'); found.empty() && scope != std::string::npos) {
    return absl::UnavailableError(absl::StrCat(
        "the scope of ", split.host, " is no interface of this machine, which has: ", DescribeInterfaces()));
  }
  if (found.empty()) return absl::UnavailableError(absl::StrCat("host '", split.host, "' is not known"));
  for (SocketAddress& address : found) address.set_port(split.port);
  return found;
}

absl::StatusOr<std::vector<SocketAddress>> ResolveBind(absl::string_view text) {
  if (std::optional<SocketAddress> literal =
          ParseHost(absl::StripSuffix(absl::StripPrefix(text, "["), "]"))) {
    return std::vector<SocketAddress>{*literal};
  }
  // Of an interface's addresses those first that others reach without knowing it: IPv4, then IPv6 of any scope.
  auto rank = [](const SocketAddress& address) {
    if (address.family() == AF_INET) return 0;
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
    return IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr) ? 2 : 1;
  };
  const Interface* best = nullptr;
  const std::vector<Interface> interfaces = Interfaces();
  for (const Interface& one : interfaces) {
    if (one.name != std::string(text)) continue;
    if (best == nullptr || rank(one.address) < rank(best->address)) best = &one;
  }
  if (best != nullptr) return std::vector<SocketAddress>{best->address};
  if (!text.empty()) {
    std::vector<SocketAddress> found = LookUp(std::string(text), AI_PASSIVE);
    if (!found.empty()) return found;
  }
  const absl::StatusOr<HostPort> with_port = SplitHostPort(text);
  return absl::InvalidArgumentError(absl::StrCat("cannot bind to '", absl::CHexEscape(text), "': ",
                                                 with_port.ok()
                                                     ? "it should be without a port, which is given apart"
                                                     : "no such interface, address or host",
                                                 ". This machine has: ", DescribeInterfaces()));
}

bool IsLoopback(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address.family() != AF_INET6) return false;
  const in6_addr& v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&v6) || (IN6_IS_ADDR_V4MAPPED(&v6) && v6.s6_addr[12] == 127);
}

bool IsWildcard(const SocketAddress& address) {
  if (address.family() == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  return IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr);
}

std::vector<SocketAddress> Reachable(const SocketAddress& bound, std::vector<SocketAddress> local,
                                     size_t max_count) {
  const auto others = std::stable_partition(local.begin(), local.end(),
                                            [](const SocketAddress& one) { return !IsLoopback(one); });
  if (others != local.begin()) local.erase(others, local.end());
  if (local.size() > max_count) local.resize(max_count);
  for (SocketAddress& address : local) address.set_port(bound.port());
  return local;
}

std::vector<SocketAddress> LocalAddresses(int family) {
  std::vector<SocketAddress> result;
  for (const Interface& one : Interfaces()) {
    if (one.address.family() != family) continue;
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&one.address.storage);
    // A link-local address means something else on each machine.
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
    result.push_back(one.address);
  }
  return result;
}

SocketAddress UnixAddressOf(absl::string_view job, const base::MemberId& member) {
  const std::string incarnation = absl::StrCat(absl::Hex(member.incarnation.value(), absl::kZeroPad16));
  auto plain = [](absl::string_view text) {
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return absl::ascii_isalnum(c) || c == '.' || c == '_'; });
  };
  // '-' separates, so names that hold one are hashed: two members never share an address.
  if (job.size() + member.name.size() <= 70 && plain(job) && plain(member.name)) {
    return UnixAddress(absl::StrCat("atoll-", job, "-", member.name, "-", incarnation));
  }
  const std::string text = absl::StrCat(job.size(), ":", job, member.name);
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  const absl::string_view half(reinterpret_cast<const char*>(digest), 16);
  return UnixAddress(absl::StrCat("atoll-", absl::BytesToHexString(half), "-", incarnation));
}

absl::StatusOr<Fd> ListenTcp(const std::vector<SocketAddress>& candidates, const PortRange& ports,
                             SocketAddress* bound) {
  std::vector<std::string> foreign;
  for (const SocketAddress& candidate : candidates) {
    *bound = candidate;
    Refused refused;
    for (const int port : InOrder(ports)) {
      bound->set_port(port);
      int error = 0;
      Fd fd = TryToListen(bound, &error);
      if (fd.valid()) return fd;
      if (error == EMFILE || error == ENFILE) return DescriptorError(error, "socket");
      refused.emplace(port, error);
      if (error != EADDRINUSE && error != EACCES) break;  // Of the address, not of the port.
    }
    if (refused.begin()->second == EADDRNOTAVAIL || refused.begin()->second == EAFNOSUPPORT) {
      foreign.push_back(HostText(candidate));
    } else {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot listen on ", HostText(candidate), ", ", DescribeRefused(ports, refused)));
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("address ", absl::StrJoin(foreign, ", "),
                                                 " is not one of this machine's: ", DescribeInterfaces()));
}

absl::StatusOr<Fd> ListenUnix(const SocketAddress& address) {
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return DescriptorError(errno, "socket");
  if (bind(fd.get(), address.raw(), address.size) != 0 || listen(fd.get(), SOMAXCONN) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("cannot listen on ", address.ToString(), ": ",
                                                      base::ErrnoStatus(errno, "bind").message()));
  }
  return fd;
}

std::string DescriptorsNeeded() {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  return absl::StrCat("the limit on open files (ulimit -n) is ", files.rlim_cur,
                      ": an endpoint needs about 14, and up to 10 for each peer");
}

absl::Status DescriptorError(int error_number, absl::string_view what) {
  absl::Status status = base::ErrnoStatus(error_number, what);
  if (error_number != EMFILE) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), "; ", DescriptorsNeeded()));
}

absl::Status ConnectError(int error_number) {
  const absl::Status status = base::ErrnoStatus(error_number, "connect");
  return error_number == ECONNREFUSED ? RefusedError(status.message())
                                      : absl::UnavailableError(status.message());
}

absl::StatusOr<Fd> StartConnect(const SocketAddress& address) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return DescriptorError(errno, "socket");
  // EAGAIN: a Unix listener's backlog is full, which passes.
  if (connect(fd.get(), address.raw(), address.size) != 0 && errno != EINPROGRESS) {
    return ConnectError(errno);
  }
  return fd;
}

absl::Status PrepareConnected(int fd, int family) {
  if (family == AF_UNIX) {
    ucred credentials{};
    socklen_t size = sizeof(credentials);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
      return base::ErrnoStatus(errno, "getsockopt SO_PEERCRED");
    }
    if (credentials.uid != geteuid()) {
      return absl::PermissionDeniedError(
          absl::StrCat("the process at the other end belongs to user ", credentials.uid, ", not to us"));
    }
    return absl::OkStatus();
  }
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return absl::OkStatus();
}

}  // namespace Atoll::transport
