#include "atoll/transport/greeter.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "atoll/base/status.h"

namespace Atoll::transport {

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
  Start(limit);
}

void Greeter::StartServer(Fd fd, const SocketAddress& address, absl::Duration limit, Done done) {
  done_ = std::move(done);
  address_ = address;
  fd_ = std::move(fd);
  handshake_ = std::make_unique<ServerHandshake>(&config_, NewNonce());
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
    self->Finish(absl::DeadlineExceededError("the handshake took too long"));
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
  }
  absl::Status received = Receive();
  // A refusal goes out even when the handshake has failed: it says why.
  absl::Status sent = Send();
  return received.ok() ? sent : received;
}

absl::Status Greeter::Receive() {
  ATOLL_RETURN_IF_ERROR(Send());
  char bytes[kMaxHandshakeBody];
  while (handshake_->wanted() > 0) {
    const ssize_t got = recv(fd_.get(), bytes, std::min(sizeof(bytes), handshake_->wanted()), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return absl::OkStatus();
    if (got < 0) return absl::UnavailableError(base::ErrnoStatus(errno, "recv").message());
    if (got == 0) return absl::UnavailableError("the peer hung up during the handshake");
    traffic_.bytes_received.fetch_add(got, std::memory_order_relaxed);
    handshake_->Feed(absl::string_view(bytes, got));
    if (!handshake_->status().ok()) return handshake_->status();
    ATOLL_RETURN_IF_ERROR(Send());
  }
  return absl::OkStatus();
}

absl::Status Greeter::Send() {
  output_ += handshake_->TakeOutput();
  while (!output_.empty()) {
    const ssize_t sent = send(fd_.get(), output_.data(), output_.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno == EAGAIN) return absl::OkStatus();
    if (sent < 0) return absl::UnavailableError(base::ErrnoStatus(errno, "send").message());
    traffic_.bytes_sent.fetch_add(sent, std::memory_order_relaxed);
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
    const Fd closed_last = std::move(fd_);  // Who sees the end finds it counted.
    std::move(done)(std::move(status));
    return;
  }
  std::move(done)(Greeted{std::move(fd_), handshake_->peer(), handshake_->purpose(), address_});
}

}  // namespace Atoll::transport
