#include "atoll/transport/greeter.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "atoll/base/status.h"
#include "atoll/transport/lingerer.h"

namespace Atoll::transport {
namespace {

// Refused peers whose sockets are kept until they have read why, and how much more they may send.
constexpr int kMaxLingering = 64;
constexpr size_t kMaxDrained = 256 << 10;

}  // namespace

void Greeter::StartClient(const SocketAddress& address, base::MemberId expected, Purpose purpose,
                          absl::Duration limit, Done done) {
  done_ = std::move(done);
  address_ = address;
  handshake_ = std::make_unique<ClientHandshake>(&config_, std::move(expected), purpose, NewNonce());
  absl::StatusOr<Fd> fd = StartConnect(address);
  // Strangers who stay must not keep us from our peers.
  while (absl::IsResourceExhausted(fd.status()) && engine_.make_room()) fd = StartConnect(address);
  if (!fd.ok()) return Finish(fd.status());
  fd_ = *std::move(fd);
  connecting_ = true;
  TakeTls(Tls::Side::kClient);
  Start(limit);
}

void Greeter::StartServer(Fd fd, const SocketAddress& address, absl::Duration limit, Done done) {
  done_ = std::move(done);
  address_ = address;
  fd_ = std::move(fd);
  handshake_ = std::make_unique<ServerHandshake>(&config_, NewNonce());
  TakeTls(Tls::Side::kServer);
  absl::Status prepared = PrepareConnected(fd_.get(), address.family());
  if (!prepared.ok()) return Finish(std::move(prepared));
  Start(limit);
}

void Greeter::Start(absl::Duration limit) {
  auto self = shared_from_this();
  absl::StatusOr<Loop::HandlerId> id =
      loop_.Register(fd_.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, self);
  if (!id.ok()) return Finish(id.status());
  id_ = *id;
  timer_ = loop_.At(loop_.Now() + limit, [self] {
    self->timer_.reset();
    self->Finish(absl::DeadlineExceededError(self->connecting_ ? "connect: no answer in time"
                                                               : "the handshake took too long"));
  });
}

void Greeter::OnEventsOnLoop(uint32_t events) {
  if (!done_) return;
  absl::Status status = Advance(events);
  if (!status.ok() || handshake_->finished()) Finish(std::move(status));
}

absl::Status Greeter::Advance(uint32_t events) {
  if (connecting_) {
    if ((events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) == 0) return absl::OkStatus();
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return ConnectError(error);
    connecting_ = false;
    ATOLL_RETURN_IF_ERROR(PrepareConnected(fd_.get(), address_.family()));
    if (tls_ != nullptr) ATOLL_RETURN_IF_ERROR(tls_->Handshake(fd_.get()));
  }
  if (tls_ != nullptr && !secured_) {
    ATOLL_RETURN_IF_ERROR(Secure());
    if (tls_ != nullptr && !secured_) return absl::OkStatus();
  }
  absl::Status received = Receive();
  // A refusal goes out even when the handshake has failed: it says why.
  absl::Status sent = Send();
  return received.ok() ? sent : received;
}

void Greeter::TakeTls(Tls::Side side) {
  side_ = side;
  // To a Unix socket the kernel lets processes of our user alone, and nobody in between.
  if (tls_context_ == nullptr || address_.family() == AF_UNIX) return;
  tls_ = std::make_shared<Tls>(tls_context_, side, &traffic_);
}

absl::Status Greeter::Secure() {
  if (!heard_) {
    uint8_t first;
    const ssize_t got = recv(fd_.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
    if (got < 0) return absl::UnavailableError(base::ErrnoStatus(errno, "recv").message());
    if (got == 0) return absl::UnavailableError("the peer hung up during the TLS handshake");
    if (side_ == Tls::Side::kClient ? first == kRefuseTls : first != kTlsRecord) {
      tls_.reset();
      handshake_->ForbidPlain();
      return absl::OkStatus();
    }
    heard_ = true;
  }
  ATOLL_RETURN_IF_ERROR(tls_->Handshake(fd_.get()));
  if (!tls_->established()) return absl::OkStatus();
  handshake_->BindTo(tls_->Binding());
  secured_ = true;
  return absl::OkStatus();
}

absl::Status Greeter::Receive() {
  ATOLL_RETURN_IF_ERROR(Send());
  char bytes[kMaxHandshakeBody];
  while (handshake_->wanted() > 0) {
    const iovec into{bytes, std::min(sizeof(bytes), handshake_->wanted())};
    const ssize_t got = tls_ != nullptr ? tls_->Receive(fd_.get(), &into, 1)
                                        : recv(fd_.get(), into.iov_base, into.iov_len, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return absl::OkStatus();
    if (got < 0 && tls_ != nullptr) return tls_->failure();
    if (got < 0) return absl::UnavailableError(base::ErrnoStatus(errno, "recv").message());
    if (got == 0) return handshake_->OnHangUp();
    if (tls_ == nullptr) traffic_.bytes_received.fetch_add(got, std::memory_order_relaxed);
    handshake_->Feed(absl::string_view(bytes, got));
    if (!handshake_->status().ok()) return handshake_->status();
    ATOLL_RETURN_IF_ERROR(Send());
  }
  return absl::OkStatus();
}

absl::Status Greeter::Send() {
  output_ += handshake_->TakeOutput();
  while (!output_.empty()) {
    const iovec from{output_.data(), output_.size()};
    const ssize_t sent = tls_ != nullptr ? tls_->Send(fd_.get(), &from, 1)
                                         : send(fd_.get(), from.iov_base, from.iov_len, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return absl::OkStatus();
    if (sent < 0) {
      const absl::Status error = absl::UnavailableError(base::ErrnoStatus(errno, "send").message());
      return tls_ != nullptr && !tls_->failure().ok() ? tls_->failure() : error;
    }
    if (tls_ == nullptr) traffic_.bytes_sent.fetch_add(sent, std::memory_order_relaxed);
    output_.erase(0, sent);
  }
  return absl::OkStatus();
}

void Greeter::Finish(absl::Status status) {
  if (!done_) return;
  // A proof that does not fit into a fresh socket's buffer: we stay until it is out.
  if (status.ok() && !output_.empty()) return;
  Done done = std::exchange(done_, nullptr);
  if (timer_.has_value()) loop_.Cancel(*timer_);
  timer_.reset();
  auto self = shared_from_this();  // The registration may hold the last reference.
  if (id_ != 0) loop_.Unregister(fd_.get(), id_);
  if (!status.ok()) {
    // An alert should arrive though the peer has sent on meanwhile.
    const bool tell = tls_ != nullptr &&
                      (absl::IsUnauthenticated(status) || absl::IsFailedPrecondition(status)) &&
                      traffic_.lingering.load() < kMaxLingering;
    auto closed_last = std::make_shared<Fd>(std::move(fd_));  // Who sees the end finds it counted.
    std::move(done)(std::move(status));
    if (tell) std::make_shared<Lingerer>(&engine_, std::move(closed_last))->Start(kMaxDrained);
    return;
  }
  std::move(done)(
      Greeted{std::move(fd_), handshake_->peer(), handshake_->purpose(), address_, std::move(tls_)});
}

}  // namespace Atoll::transport
