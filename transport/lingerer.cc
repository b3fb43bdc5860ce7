#include "atoll/transport/lingerer.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <utility>

namespace Atoll::transport {
namespace {

constexpr absl::Duration kLinger = absl::Seconds(1);

}  // namespace

Lingerer::Lingerer(Engine* engine, std::shared_ptr<Fd> fd)
    : loop_(*engine->loop), traffic_(engine->traffic), fd_(std::move(fd)) {
  traffic_.lingering.fetch_add(1);
}

Lingerer::~Lingerer() { traffic_.lingering.fetch_sub(1); }

void Lingerer::Start(size_t max_bytes) {
  bytes_left_ = max_bytes;
  if (shutdown(fd_->get(), SHUT_WR) != 0) return;
  absl::StatusOr<Loop::HandlerId> id =
      loop_.Register(fd_->get(), EPOLLIN | EPOLLRDHUP | EPOLLET, shared_from_this());
  if (!id.ok()) return;
  id_ = *id;
  timer_ = loop_.At(loop_.Now() + kLinger, [self = shared_from_this()] { self->End(); });
}

void Lingerer::OnEventsOnLoop(uint32_t) {
  char sink[16 << 10];
  while (true) {
    const ssize_t got = recv(fd_->get(), sink, sizeof(sink), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got > 0 && static_cast<size_t>(got) < bytes_left_) {
      bytes_left_ -= got;
      continue;
    }
    if (got < 0 && errno == EAGAIN) return;
    loop_.Cancel(timer_);
    return End();
  }
}

void Lingerer::End() {
  if (id_ != 0) loop_.Unregister(fd_->get(), std::exchange(id_, 0));
}

}  // namespace Atoll::transport
