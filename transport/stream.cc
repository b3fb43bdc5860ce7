#include "atoll/transport/stream.h"

#include <endian.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/transport/lingerer.h"

namespace Atoll::transport {
namespace {

constexpr uint32_t kReadEvents = EPOLLIN | EPOLLRDHUP | EPOLLET;
constexpr size_t kHeadBytes = 8;
constexpr size_t kFramesAtOnce = 30;
// What one turn may move before it lets others run: TensorPipe serializes all pipes of a context, so a
// caller that sends 64 MiB itself would hold up every heartbeat.
constexpr size_t kCallerBudget = 256 << 10;
constexpr size_t kLoopBudget = 4 << 20;

bool IsUnixSocket(int fd) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

}  // namespace

Stream::~Stream() = default;

void Stream::AttachOnLoop(Fd fd, std::shared_ptr<Tls> tls) {
  auto shared = std::make_shared<Fd>(std::move(fd));
  {
    absl::MutexLock lock(&mu_);
    if (failed_) return;
    fd_ = shared;
    tls_ = std::move(tls);
    readable_ = tls_ != nullptr;  // It may hold bytes that no event tells of.
    attached_ = true;
  }
  const bool is_unix = IsUnixSocket(shared->get());
  absl::StatusOr<Loop::HandlerId> id =
      loop_.Register(shared->get(), is_unix ? kReadEvents : kReadEvents | EPOLLOUT, shared_from_this());
  if (!id.ok()) return Fail(id.status(), /*local=*/false);
  {
    absl::MutexLock lock(&mu_);
    id_ = *id;
    awaits_writable_ = !is_unix;
    writable_ |= is_unix;
  }
  if (is_unix) PumpWrites();
}

void Stream::Stash(std::string frame) {
  absl::MutexLock lock(&mu_);
  stash_.push_back(std::move(frame));
}

void Stream::OnEventsOnLoop(uint32_t events) {
  const bool hang_up = (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
  {
    absl::MutexLock lock(&mu_);
    if ((events & EPOLLIN) != 0 || hang_up) readable_ = true;
    if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) {
      writable_ = true;
      ++write_events_;
    }
    hung_up_ |= hang_up;
  }
  PumpWrites();
  PumpReads();
}

void Stream::Write(const void* data, size_t bytes, WriteDone done) {
  tensorpipe::Error error;
  {
    absl::MutexLock lock(&mu_);
    if (!failed_) {
      writes_.push_back(WriteOp{static_cast<const char*>(data), bytes, htole64(bytes), 0, std::move(done)});
    } else {
      error = error_;
    }
  }
  if (error) return done(error);
  PumpWrites();
}

void Stream::PopSentLocked(size_t sent, std::vector<WriteDone>* completed) {
  while (!writes_.empty()) {
    WriteOp& op = writes_.front();
    const size_t rest = kHeadBytes + op.bytes - op.sent;
    if (sent < rest) {
      op.sent += sent;
      return;
    }
    sent -= rest;
    completed->push_back(std::move(op.done));
    writes_.pop_front();
  }
}

ssize_t Stream::SendParts(Fd& fd, const iovec* parts, size_t count) {
  if (tls_ != nullptr) return tls_->Send(fd.get(), parts, count);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = count;
  const ssize_t sent = sendmsg(fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent > 0) traffic_.bytes_sent.fetch_add(sent, std::memory_order_relaxed);
  return sent;
}

ssize_t Stream::ReceiveParts(const iovec* parts, size_t count) {
  if (tls_ != nullptr) return tls_->Receive(receive_fd_->get(), parts, count);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = count;
  const ssize_t received = recvmsg(receive_fd_->get(), &message, MSG_DONTWAIT);
  if (received > 0) traffic_.bytes_received.fetch_add(received, std::memory_order_relaxed);
  return received;
}

absl::Status Stream::SocketError(int error, absl::string_view what) const {
  const absl::Status inside = tls_ != nullptr ? tls_->failure() : absl::OkStatus();
  return inside.ok() ? absl::UnavailableError(base::ErrnoStatus(error, what).message()) : inside;
}

void Stream::PumpWrites() {
  size_t budget = loop_.InLoop() ? kLoopBudget : kCallerBudget;
  absl::Status failure;
  std::vector<WriteDone> completed;
  std::array<iovec, 2 * kFramesAtOnce> parts;
  mu_.Lock();
  if (sending_) {
    mu_.Unlock();
    return;
  }
  sending_ = true;
  while (attached_ && !failed_ && writable_ && !writes_.empty() && budget > 0) {
    // Elements of a deque stay in place while others append, and only the sender takes them off.
    size_t count = 0;
    for (size_t i = 0; i < writes_.size() && i < kFramesAtOnce; ++i) {
      WriteOp& op = writes_[i];
      size_t data_sent = 0;
      if (op.sent < kHeadBytes) {
        parts[count++] = {reinterpret_cast<char*>(&op.length) + op.sent, kHeadBytes - op.sent};
      } else {
        data_sent = op.sent - kHeadBytes;
      }
      if (op.bytes > data_sent)
        parts[count++] = {const_cast<char*>(op.data) + data_sent, op.bytes - data_sent};
    }
    const uint64_t events_seen = write_events_;
    const std::shared_ptr<Fd> fd = fd_;
    mu_.Unlock();
    const ssize_t sent = SendParts(*fd, parts.data(), count);
    const int error = errno;
    mu_.Lock();
    if (sent < 0) {
      if (error == EINTR) continue;
      if (error == EAGAIN && !awaits_writable_) {
        // Room that has come meanwhile is reported too.
        awaits_writable_ = true;
        if (id_ == 0 || loop_.Modify(fd->get(), id_, kReadEvents | EPOLLOUT)) {
          writable_ = false;
          continue;
        }
        failure = absl::UnavailableError(base::ErrnoStatus(errno, "epoll_ctl").message());
        break;
      }
      if (error == EAGAIN) {
        // Writable again in between: the event has been, no other will come.
        if (events_seen == write_events_) writable_ = false;
        continue;
      }
      failure = SocketError(error, "send");
      break;
    }
    budget -= std::min<size_t>(budget, sent);
    PopSentLocked(sent, &completed);
    if (completed.empty()) continue;
    mu_.Unlock();
    for (WriteDone& done : completed) done(tensorpipe::Error::kSuccess);
    completed.clear();
    mu_.Lock();
  }
  sending_ = false;
  const bool yield = !failed_ && failure.ok() && attached_ && writable_ && !writes_.empty();
  const bool give_back = finished_;
  mu_.Unlock();
  if (!failure.ok()) Fail(std::move(failure), /*local=*/false);
  if (yield) loop_.Defer([self = shared_from_this()] { self->PumpWrites(); });
  if (give_back) FailWrites();
}

void Stream::Read(void* into, size_t bytes, ReadDone done) {
  AddRead(ReadOp{into, bytes, false, std::move(done)});
}

void Stream::ReadFrame(size_t max_bytes, ReadDone done) {
  AddRead(ReadOp{nullptr, max_bytes, true, std::move(done)});
}

void Stream::AddRead(ReadOp op) {
  {
    absl::MutexLock lock(&mu_);
    reads_.push_back(std::move(op));
  }
  PumpReads();
}

void Stream::PumpReads() {
  size_t budget = loop_.InLoop() ? kLoopBudget : 0;
  absl::Status failure;
  bool yield = false;
  mu_.Lock();
  if (receiving_) {
    mu_.Unlock();
    return;
  }
  receiving_ = true;
  while (failure.ok() && !yield && !reads_.empty()) {
    if (!stash_.empty() && reads_.front().dynamic) {
      const std::string frame = std::move(stash_.front());
      stash_.pop_front();
      ReadDone done = std::move(reads_.front().done);
      reads_.pop_front();
      mu_.Unlock();
      done(tensorpipe::Error::kSuccess, frame.data(), frame.size());
      mu_.Lock();
      continue;
    }
    if (finished_) {
      ReadOp op = std::move(reads_.front());
      reads_.pop_front();
      const tensorpipe::Error error = error_;
      mu_.Unlock();
      op.done(error, op.into, op.dynamic ? 0 : op.bytes);
      mu_.Lock();
      continue;
    }
    if (failed_ || !attached_) break;
    receive_fd_ = fd_;
    ReadOp& op = reads_.front();  // Stays in place: only the receiver takes it off.
    mu_.Unlock();
    const Step step = AdvanceRead(op, &budget, &failure);
    if (step == Step::kComplete) DeliverFrame();
    mu_.Lock();
    // Finished in between: FinishOnLoop has left it to us to give the reads back.
    if (step == Step::kNeedMore && !readable_ && !finished_) break;
    yield = step == Step::kYield;
  }
  receiving_ = false;
  receive_fd_.reset();
  const bool look = reads_.empty() && hung_up_ && attached_ && !failed_;
  mu_.Unlock();
  if (!failure.ok()) {
    Fail(std::move(failure), /*local=*/false);
  } else if (look && loop_.InLoop()) {
    LookAtEndOnLoop();
  }
  if (yield) loop_.Defer([self = shared_from_this()] { self->PumpReads(); });
}

void Stream::LookAtEndOnLoop() {
  std::shared_ptr<Fd> fd;
  bool unread;
  {
    absl::MutexLock lock(&mu_);
    if (receiving_ || failed_ || !reads_.empty()) return;
    unread = !stash_.empty() || ahead_begin_ != ahead_end_;
    fd = fd_;
  }
  if (!unread && tls_ != nullptr) {
    unread = !tls_->AtEnd(fd->get());
  } else if (!unread) {
    char byte;
    const ssize_t got = recv(fd->get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    unread = got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
  }
  if (!unread) return Fail(absl::UnavailableError("the peer closed the connection"), /*local=*/false);
  if (on_unread_) std::exchange(on_unread_, nullptr)();
}

size_t Stream::TakeAhead(char* into, size_t bytes) {
  const size_t size = std::min(bytes, ahead_end_ - ahead_begin_);
  if (size == 0) return 0;
  std::memcpy(into, ahead_.get() + ahead_begin_, size);
  ahead_begin_ += size;
  return size;
}

Stream::Step Stream::Receive(char* into, size_t bytes, size_t* got, size_t* budget, absl::Status* failure) {
  {
    absl::MutexLock lock(&mu_);
    if (!readable_) return Step::kNeedMore;
    if (failed_) return Step::kFailed;
  }
  if (*budget == 0) return Step::kYield;
  if (ahead_ == nullptr) ahead_.reset(new char[kAheadBytes]);
  size_t keep = ahead_end_ - ahead_begin_;
  if (keep > 0) std::memmove(ahead_.get(), ahead_.get() + ahead_begin_, keep);
  ahead_begin_ = 0;
  ahead_end_ = keep;
  const iovec parts[2] = {{into, bytes}, {ahead_.get() + keep, kAheadBytes - keep}};
  while (true) {
    const ssize_t received = bytes > 0 ? ReceiveParts(parts, 2) : ReceiveParts(parts + 1, 1);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && errno == EAGAIN) {
      absl::MutexLock lock(&mu_);
      readable_ = false;
      return Step::kNeedMore;
    }
    if (received < 0) {
      *failure = SocketError(errno, "recv");
      return Step::kFailed;
    }
    if (received == 0) {
      *failure = absl::UnavailableError("the peer closed the connection");
      return Step::kFailed;
    }
    *budget -= std::min<size_t>(*budget, received);
    *got = std::min<size_t>(received, bytes);
    ahead_end_ += received - *got;
    if (tls_ == nullptr && static_cast<size_t>(received) < bytes + kAheadBytes - keep) {
      // It had no more: what comes is told of (epoll(7)), except for the end, if that has been told. TLS gives
      // record by record, whatever lies behind.
      absl::MutexLock lock(&mu_);
      if (!hung_up_) readable_ = false;
    }
    return Step::kComplete;
  }
}

Stream::Step Stream::FillHead(size_t* budget, absl::Status* failure) {
  while (ahead_end_ - ahead_begin_ < kHeadBytes) {
    size_t got = 0;
    const Step step = Receive(nullptr, 0, &got, budget, failure);
    if (step != Step::kComplete) return step;
  }
  uint64_t length;
  TakeAhead(reinterpret_cast<char*>(&length), kHeadBytes);
  frame_bytes_ = le64toh(length);
  frame_got_ = 0;
  return Step::kComplete;
}

Stream::Step Stream::AdvanceRead(ReadOp& op, size_t* budget, absl::Status* failure) {
  if (!frame_bytes_.has_value()) {
    const Step step = FillHead(budget, failure);
    if (step != Step::kComplete) return step;
  }
  const uint64_t length = *frame_bytes_;
  if (op.dynamic ? length > op.bytes : length != op.bytes) {
    *failure = absl::InvalidArgumentError(absl::StrCat(
        "a frame of ", length, " bytes where ", op.dynamic ? "at most " : "", op.bytes, " were expected"));
    return Step::kFailed;
  }
  if (op.dynamic && frame_ == nullptr) {
    if (ahead_end_ - ahead_begin_ >= length) return Step::kComplete;  // Used where it lies.
    frame_.reset(new char[length]);
  }
  char* const into = op.dynamic ? frame_.get() : static_cast<char*>(op.into);
  while (true) {
    frame_got_ += TakeAhead(into + frame_got_, length - frame_got_);
    if (frame_got_ == length) return Step::kComplete;
    size_t got = 0;
    const Step step = Receive(into + frame_got_, length - frame_got_, &got, budget, failure);
    if (step != Step::kComplete) return step;
    frame_got_ += got;
  }
}

void Stream::DeliverFrame() {
  ReadOp op;
  {
    absl::MutexLock lock(&mu_);
    op = std::move(reads_.front());
    reads_.pop_front();
  }
  const size_t length = *frame_bytes_;
  if (!op.dynamic) {
    frame_bytes_.reset();
    return op.done(tensorpipe::Error::kSuccess, op.into, length);
  }
  const bool in_place = frame_ == nullptr;
  const char* data = in_place ? ahead_.get() + ahead_begin_ : frame_.get();
  op.done(tensorpipe::Error::kSuccess, data, length);
  if (in_place) ahead_begin_ += length;
  frame_.reset();
  frame_bytes_.reset();
}

void Stream::Close(absl::Status status) { Fail(std::move(status), /*local=*/true); }

void Stream::OnEnd(absl::AnyInvocable<void(const absl::Status&)> on_end) {
  absl::Status status;
  {
    absl::MutexLock lock(&mu_);
    if (!failed_) {
      on_end_.push_back(std::move(on_end));
      return;
    }
    status = FromError(error_);
  }
  std::move(on_end)(status);
}

void Stream::Fail(absl::Status status, bool local) {
  std::vector<absl::AnyInvocable<void(const absl::Status&)>> on_end;
  {
    absl::MutexLock lock(&mu_);
    if (failed_) return;
    failed_ = true;
    closed_by_us_ = local;
    error_ = ToError(status);
    on_end.swap(on_end_);
  }
  loop_.Defer([self = shared_from_this()] { self->FinishOnLoop(); });
  for (auto& told : on_end) std::move(told)(status);
}

void Stream::FinishOnLoop() {
  std::shared_ptr<Fd> fd;
  Loop::HandlerId id;
  bool linger;
  {
    absl::MutexLock lock(&mu_);
    fd = std::move(fd_);
    id = std::exchange(id_, 0);
    attached_ = false;
    linger = fd != nullptr && closed_by_us_ && !hung_up_ && !sending_ && writes_.empty();
  }
  if (id != 0) loop_.Unregister(fd->get(), id);
  bool give_back;
  {
    absl::MutexLock lock(&mu_);
    finished_ = true;
    give_back = !sending_;
  }
  if (give_back) FailWrites();
  PumpReads();
  if (linger && tls_ != nullptr) tls_->SayGoodbye(fd->get());
  if (linger) std::make_shared<Lingerer>(engine_.get(), std::move(fd))->Start();
}

void Stream::FailWrites() {
  std::deque<WriteOp> writes;
  tensorpipe::Error error;
  {
    absl::MutexLock lock(&mu_);
    writes.swap(writes_);
    error = error_;
  }
  for (WriteOp& op : writes) op.done(error);
}

}  // namespace Atoll::transport
