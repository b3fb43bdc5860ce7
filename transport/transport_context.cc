#include "atoll/transport/transport_context.h"

#include <fcntl.h>
#include <sys/epoll.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"

namespace Atoll::transport {
namespace {

constexpr size_t kMaxFirstFrame = 16 << 10;
constexpr size_t kMaxBrochure = 64 << 10;
constexpr int kAcceptsAtOnce = 64;
constexpr size_t kToldHosts = 32;
constexpr size_t kToldOfAHost = 3;
constexpr absl::Duration kAcceptPause = absl::Milliseconds(50);
// How long a Join waits for the last bytes of closed connections to be read by their peers.
constexpr absl::Duration kDrainLimit = absl::Milliseconds(250);

class ListenerOfDoor final : public tensorpipe::transport::Listener {
 public:
  ListenerOfDoor(std::shared_ptr<TransportContext> context, std::shared_ptr<Door> door, std::string address)
      : context_(std::move(context)), door_(std::move(door)), address_(std::move(address)) {}
  ~ListenerOfDoor() override { close(); }
  void accept(accept_callback_fn fn) override { door_->Wait(std::move(fn)); }
  std::string addr() const override { return address_; }
  void setId(std::string id) override {}
  void close() override { door_->Close(); }

 private:
  const std::shared_ptr<TransportContext> context_;
  const std::shared_ptr<Door> door_;
  const std::string address_;
};

Fd Reserve() { return Fd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

void Door::Wait(Accept accept) {
  std::shared_ptr<Connection> connection;
  {
    absl::MutexLock lock(&mu_);
    if (!closed_) {
      if (ready_.empty()) {
        waiting_.push_back(std::move(accept));
        return;
      }
      connection = std::move(ready_.front());
      ready_.pop_front();
    }
  }
  if (connection == nullptr) return accept(ToError(absl::CancelledError("the listener is closed")), nullptr);
  accept(tensorpipe::Error::kSuccess, std::move(connection));
}

void Door::Deliver(std::shared_ptr<Connection> connection) {
  Accept accept;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    if (waiting_.empty()) {
      ready_.push_back(std::move(connection));
      return;
    }
    accept = std::move(waiting_.front());
    waiting_.pop_front();
  }
  accept(tensorpipe::Error::kSuccess, std::move(connection));
}

void Door::Close() {
  std::deque<Accept> waiting;
  std::deque<std::shared_ptr<Connection>> ready;
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
    waiting.swap(waiting_);
    ready.swap(ready_);
  }
  for (Accept& accept : waiting) accept(ToError(absl::CancelledError("the listener is closed")), nullptr);
}

class TransportContext::Acceptor : public Loop::Handler {
 public:
  Acceptor(std::weak_ptr<TransportContext> context, Fd fd, SocketAddress address)
      : context_(std::move(context)), fd(std::move(fd)), address(address) {}
  void OnEventsOnLoop(uint32_t) override {
    if (auto context = context_.lock()) context->AcceptOnLoop(this);
  }

 private:
  const std::weak_ptr<TransportContext> context_;

 public:
  const Fd fd;
  const SocketAddress address;
  Loop::HandlerId id = 0;
};

TransportContext::TransportContext(std::shared_ptr<Engine> engine, Options options)
    : engine_(std::move(engine)), loop_(*engine_->loop), options_(std::move(options)), reserve_(Reserve()) {
  for (int i = 0; i <= kLanes; ++i) doors_.push_back(std::make_shared<Door>());
}

absl::Status TransportContext::Serve(Fd listening, const SocketAddress& address) {
  auto acceptor = std::make_shared<Acceptor>(weak_from_this(), std::move(listening), address);
  absl::Status status;
  absl::Notification done;
  loop_.Defer([this, acceptor, &status, &done] {
    status = ServeOnLoop(acceptor);
    done.Notify();
  });
  done.WaitForNotification();
  return status;
}

absl::Status TransportContext::ServeOnLoop(const std::shared_ptr<Acceptor>& acceptor) {
  if (closed()) return absl::CancelledError("the endpoint is closed");
  absl::StatusOr<Loop::HandlerId> id = loop_.Register(acceptor->fd.get(), EPOLLIN, acceptor);
  if (!id.ok()) return base::Annotate(id.status(), acceptor->address.ToString());
  acceptor->id = *id;
  acceptors_.push_back(acceptor);
  engine_->make_room = [weak = weak_from_this()] {
    const std::shared_ptr<TransportContext> context = weak.lock();
    return context != nullptr && context->DropOldestOnLoop("no descriptor is left for a call of ours");
  };
  return absl::OkStatus();
}

// --- The door -----------------------------------------------------------------------------------------

void TransportContext::AcceptOnLoop(Acceptor* acceptor) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    SocketAddress peer;
    peer.size = sizeof(peer.storage);
    Fd fd(accept4(acceptor->fd.get(), peer.raw(), &peer.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      engine_->traffic.accepted.fetch_add(1, std::memory_order_relaxed);
      // The connecting end of a Unix socket has no name: the listening one tells more.
      GreetOnLoop(std::move(fd), peer.family() == AF_UNIX ? acceptor->address : peer);
      continue;
    }
    switch (errno) {
      case EAGAIN:
        return;
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        // Strangers who stay must not keep out who comes: he may be honest.
        if (!DropOldestOnLoop("no descriptor is left")) return ShedOnLoop(acceptor->fd.get());
        continue;
      default:
        continue;  // ECONNABORTED, EINTR and network errors of the one connection.
    }
  }
}

void TransportContext::ShedOnLoop(int listening_fd) {
  reserve_.reset();
  Fd shed(accept4(listening_fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  const bool did = shed.valid();
  shed.reset();
  reserve_ = Reserve();
  engine_->traffic.refused.fetch_add(did ? 1 : 0, std::memory_order_relaxed);
  if (!std::exchange(told_full_, true)) {
    ATOLL_LOG(kWarning) << "no descriptor is left for who connects: " << DescriptorsNeeded();
  }
  if (did && reserve_.valid()) return;
  // Nothing can be shed: the listener, which stays ready, is left alone for a while.
  for (const std::shared_ptr<Acceptor>& acceptor : acceptors_) {
    if (acceptor->fd.get() != listening_fd || acceptor->id == 0) continue;
    loop_.Unregister(listening_fd, std::exchange(acceptor->id, 0));
    loop_.At(loop_.Now() + kAcceptPause, [this, acceptor] {
      if (closed()) return;
      if (!reserve_.valid()) reserve_ = Reserve();
      absl::StatusOr<Loop::HandlerId> id = loop_.Register(acceptor->fd.get(), EPOLLIN, acceptor);
      if (id.ok()) acceptor->id = *id;
    });
  }
}

void TransportContext::GreetOnLoop(Fd fd, const SocketAddress& address) {
  const std::shared_ptr<Greeter> greeter = NewGreeter();
  auto place = strangers_.insert(strangers_.end(), greeter);
  greeter->StartServer(std::move(fd), address, options_.handshake_limit,
                       [self = shared_from_this(), place, address](absl::StatusOr<Greeted> greeted) {
                         self->strangers_.erase(place);
                         if (!greeted.ok()) return self->Refuse(greeted.status(), address);
                         self->AdmitOnLoop(*std::move(greeted));
                       });
  if (static_cast<int>(strangers_.size()) > options_.max_unauthenticated) {
    DropOldestOnLoop("too many strangers at the door");
  }
}

bool TransportContext::DropOldestOnLoop(absl::string_view why) {
  if (strangers_.empty()) return false;
  const std::shared_ptr<Greeter> oldest = strangers_.front();
  oldest->Abort(absl::ResourceExhaustedError(absl::StrCat(why, "; the oldest stranger goes")));
  return true;
}

void TransportContext::Refuse(const absl::Status& status, const SocketAddress& address) {
  engine_->traffic.refused.fetch_add(1, std::memory_order_relaxed);
  if (IsNewsOnLoop(status, address)) {
    ATOLL_LOG(kWarning) << "refused a connection from " << address.ToString() << ": " << status.message();
  } else {
    ATOLL_LOG(kDebug) << "refused a connection from " << address.ToString() << ": " << status.message();
  }
}

bool TransportContext::IsNewsOnLoop(const absl::Status& status, const SocketAddress& address) {
  // Another version, build, job or key, a wrong certificate: a mistake in a launch. All else is noise, or an attack.
  if (!absl::IsFailedPrecondition(status) && !absl::IsUnauthenticated(status)) return false;
  const std::string text = address.ToString();
  const std::string host = text.substr(0, text.rfind(':'));
  if (!told_.contains(host) && told_.size() >= kToldHosts) return false;
  std::set<std::string>& said = told_[host];
  return said.size() < kToldOfAHost && said.emplace(status.message()).second;
}

void TransportContext::AdmitOnLoop(Greeted greeted) {
  engine_->traffic.authenticated.fetch_add(1, std::memory_order_relaxed);
  if (greeted.purpose.listener >= doors_.size()) {
    return Refuse(absl::InvalidArgumentError("no such listener"), greeted.address);
  }
  auto arrival = std::make_shared<Arrival>(
      Arrival{NewStream(nullptr), greeted.peer, greeted.purpose, greeted.address, {}, {}});
  arrival->timer = loop_.At(loop_.Now() + options_.handshake_limit, [arrival] {
    arrival->timer.reset();
    arrival->stream->Close(absl::DeadlineExceededError("the first frames took too long"));
  });
  arrival->stream->AttachOnLoop(std::move(greeted.fd), std::move(greeted.tls));
  arrival->stream->ReadFrame(
      kMaxFirstFrame,
      [self = shared_from_this(), arrival](const tensorpipe::Error& error, const void* data, size_t bytes) {
        absl::Status status = FromError(error);
        if (status.ok()) {
          status = self->OnFirstFrame(arrival, absl::string_view(static_cast<const char*>(data), bytes));
        }
        if (status.ok()) return;
        if (arrival->timer.has_value()) self->loop_.Cancel(*arrival->timer);
        self->Refuse(status, arrival->address);
        arrival->stream->Close(status);
      });
}

absl::Status TransportContext::OnFirstFrame(const std::shared_ptr<Arrival>& arrival,
                                            absl::string_view frame) {
  if (arrival->purpose.listener > 0) {
    tensorpipe::NopHolder<tensorpipe::channel::mpt::Packet> hello;
    ATOLL_RETURN_IF_ERROR(DecodeFrame(frame, hello));
    if (!hello.getObject().is<tensorpipe::channel::mpt::ClientHello>()) {
      return absl::InvalidArgumentError("not a hello for a lane");
    }
    arrival->first_frame = std::string(frame);
    Deliver(arrival, nullptr);
    return absl::OkStatus();
  }
  tensorpipe::NopHolder<tensorpipe::Packet> packet;
  ATOLL_RETURN_IF_ERROR(DecodeFrame(frame, packet));
  const bool new_pipe = packet.getObject().is<tensorpipe::SpontaneousConnection>();
  const bool joins = packet.getObject().is<tensorpipe::RequestedConnection>();
  if (new_pipe == joins || new_pipe == (arrival->purpose.lane == Purpose::kNoLane)) {
    return absl::InvalidArgumentError("not what the connection was greeted for");
  }
  if (joins) {
    arrival->first_frame = std::string(frame);
    Deliver(arrival, nullptr);
    return absl::OkStatus();
  }
  arrival->stream->ReadFrame(
      kMaxBrochure,
      [self = shared_from_this(), arrival](const tensorpipe::Error& error, const void* data, size_t bytes) {
        absl::Status status = FromError(error);
        if (status.ok()) {
          status = self->OnBrochure(arrival, absl::string_view(static_cast<const char*>(data), bytes));
        }
        if (status.ok()) return;
        if (arrival->timer.has_value()) self->loop_.Cancel(*arrival->timer);
        self->Refuse(status, arrival->address);
        arrival->stream->Close(status);
      });
  return absl::OkStatus();
}

absl::Status TransportContext::OnBrochure(const std::shared_ptr<Arrival>& arrival, absl::string_view frame) {
  tensorpipe::NopHolder<tensorpipe::Brochure> brochure;
  ATOLL_RETURN_IF_ERROR(DecodeFrame(frame, brochure));
  absl::StatusOr<DevicePairs> pairs = CheckBrochure(brochure.getObject(), *channels_);
  if (!pairs.ok()) return pairs.status();
  auto link = std::make_shared<Link>(PeerInfo{arrival->peer, static_cast<Lane>(arrival->purpose.lane),
                                              arrival->address.ToString(), /*initiated=*/false});
  link->Settle(*std::move(pairs));
  arrival->stream->OnEnd([link](const absl::Status& status) { link->End(status); });
  arrival->stream->OnUnread([link] { link->HangUp(); });
  // TensorPipe hands on the name in the first frame as its pipe's remote name: ours, not the peer's, so
  // that the pipe finds its link and nobody can claim another's.
  std::string name;
  {
    absl::MutexLock lock(&mu_);
    name = absl::StrCat("link/", next_id_++);
    accepted_[name] = link;
  }
  tensorpipe::NopHolder<tensorpipe::Packet> packet;
  packet.getObject().Become(packet.getObject().index_of<tensorpipe::SpontaneousConnection>());
  packet.getObject().get<tensorpipe::SpontaneousConnection>()->contextName = name;
  arrival->stream->Stash(EncodeFrame(packet));
  arrival->first_frame = std::string(frame);
  Deliver(arrival, std::move(link));
  return absl::OkStatus();
}

void TransportContext::Deliver(const std::shared_ptr<Arrival>& arrival, std::shared_ptr<Link> link) {
  if (arrival->timer.has_value()) loop_.Cancel(*arrival->timer);
  arrival->timer.reset();
  arrival->stream->Stash(std::move(arrival->first_frame));
  Inspection inspection{channels_, options_.limits, std::move(link), nullptr};
  auto connection = std::make_shared<Connection>(arrival->stream, std::move(inspection));
  doors_[arrival->purpose.listener]->Deliver(std::move(connection));
}

std::shared_ptr<Link> TransportContext::TakeLink(const std::string& remote_name) {
  absl::MutexLock lock(&mu_);
  auto it = accepted_.find(remote_name);
  if (it == accepted_.end()) return nullptr;
  std::shared_ptr<Link> link = std::move(it->second);
  accepted_.erase(it);
  return link;
}

// --- Our own connections ------------------------------------------------------------------------------

std::shared_ptr<Stream> TransportContext::NewStream(std::shared_ptr<Link> link) {
  auto stream = std::make_shared<Stream>(engine_);
  bool closed;
  {
    absl::MutexLock lock(&mu_);
    closed = closed_;
    streams_[stream.get()] = stream;
  }
  stream->OnEnd([weak = weak_from_this(), key = stream.get(), link](const absl::Status& status) {
    if (link != nullptr) link->End(status);
    if (auto self = weak.lock()) {
      absl::MutexLock lock(&self->mu_);
      self->streams_.erase(key);
    }
  });
  if (closed) stream->Close(absl::CancelledError("the endpoint is closed"));
  return stream;
}

std::string TransportContext::Offer(Greeted greeted, std::shared_ptr<Link> link) {
  absl::MutexLock lock(&mu_);
  const uint64_t id = next_id_++;
  offered_.emplace(id, Offered{std::move(greeted), std::move(link)});
  return absl::StrCat(kTransportName, "://ticket/", id);
}

std::shared_ptr<tensorpipe::transport::Connection> TransportContext::connect(std::string address) {
  const std::vector<std::string> parts = absl::StrSplit(address, '/');
  uint64_t id = 0;
  int listener = 0;
  if (parts.size() == 2 && parts[0] == "ticket" && absl::SimpleAtoi(parts[1], &id)) return ConnectTicket(id);
  if (parts.size() == 3 && parts[0] == "route" && absl::SimpleAtoi(parts[1], &id) &&
      absl::SimpleAtoi(parts[2], &listener) && listener >= 0 && listener <= kLanes) {
    return ConnectRoute(id, listener);
  }
  return Refused(absl::InvalidArgumentError("not an address of this transport"));
}

std::shared_ptr<tensorpipe::transport::Connection> TransportContext::Wrap(std::shared_ptr<Stream> stream,
                                                                          std::shared_ptr<Link> link,
                                                                          std::shared_ptr<Route> route) {
  return std::make_shared<Connection>(
      std::move(stream), Inspection{channels_, options_.limits, std::move(link), std::move(route)});
}

std::shared_ptr<tensorpipe::transport::Connection> TransportContext::Refused(absl::Status status) {
  auto stream = NewStream(nullptr);
  stream->Close(std::move(status));
  return Wrap(std::move(stream), nullptr, nullptr);
}

std::shared_ptr<tensorpipe::transport::Connection> TransportContext::ConnectTicket(uint64_t id) {
  std::optional<Offered> offered;
  auto route = std::make_shared<Route>();
  {
    absl::MutexLock lock(&mu_);
    auto it = offered_.find(id);
    if (it != offered_.end()) {
      offered = std::move(it->second);
      offered_.erase(it);
      route->id = id;
      route->address = offered->greeted.address;
      route->peer = offered->greeted.peer;
      routes_[id] = route;
      std::erase_if(routes_, [](const auto& entry) { return entry.second.expired(); });
    }
  }
  if (!offered.has_value()) return Refused(absl::InternalError("a ticket that was not given out"));
  auto stream = NewStream(offered->link);
  stream->AttachOnLoop(std::move(offered->greeted.fd), std::move(offered->greeted.tls));
  return Wrap(std::move(stream), std::move(offered->link), std::move(route));
}

std::shared_ptr<tensorpipe::transport::Connection> TransportContext::ConnectRoute(uint64_t id, int listener) {
  std::shared_ptr<Route> route;
  {
    absl::MutexLock lock(&mu_);
    auto it = routes_.find(id);
    if (it != routes_.end()) route = it->second.lock();
  }
  if (route == nullptr) return Refused(absl::CancelledError("the pipe is closed"));
  auto stream = NewStream(nullptr);
  loop_.Defer([self = shared_from_this(), stream, route, listener] {
    // CloseOnLoop aborts who is being greeted, and may have run.
    if (self->closed()) return stream->Close(absl::CancelledError("the endpoint is closed"));
    const std::shared_ptr<Greeter> greeter = self->NewGreeter();
    self->callers_[greeter.get()] = greeter;
    greeter->StartClient(
        route->address, route->peer, Purpose{static_cast<uint8_t>(listener), Purpose::kNoLane},
        self->options_.handshake_limit, [self, stream, key = greeter.get()](absl::StatusOr<Greeted> greeted) {
          self->callers_.erase(key);
          if (!greeted.ok()) return stream->Close(greeted.status());
          stream->AttachOnLoop(std::move(greeted->fd), std::move(greeted->tls));
        });
  });
  return Wrap(std::move(stream), nullptr, std::move(route));
}

std::shared_ptr<tensorpipe::transport::Listener> TransportContext::listen(std::string address) {
  const std::vector<std::string> parts = absl::StrSplit(address, '/');
  size_t listener = 0;
  std::shared_ptr<Door> door;
  if (parts.size() == 2 && parts[0] == "lane" && absl::SimpleAtoi(parts[1], &listener) &&
      listener < doors_.size()) {
    door = doors_[listener];
  } else {
    door = std::make_shared<Door>();
    door->Close();
  }
  return std::make_shared<ListenerOfDoor>(shared_from_this(), std::move(door), std::move(address));
}

// --- The end ------------------------------------------------------------------------------------------

void TransportContext::close() {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
  }
  for (const std::shared_ptr<Door>& door : doors_) door->Close();
  loop_.Defer([self = shared_from_this()] { self->CloseOnLoop(); });
}

void TransportContext::CloseOnLoop() {
  const absl::Status status = absl::CancelledError("the endpoint is closed");
  for (const std::shared_ptr<Acceptor>& acceptor : acceptors_) {
    if (acceptor->id != 0) loop_.Unregister(acceptor->fd.get(), acceptor->id);
  }
  acceptors_.clear();
  while (!strangers_.empty()) {
    std::shared_ptr<Greeter> stranger = strangers_.front();
    stranger->Abort(status);
  }
  while (!callers_.empty()) {
    std::shared_ptr<Greeter> caller = callers_.begin()->second;
    caller->Abort(status);
  }
  std::vector<std::shared_ptr<Stream>> streams;
  std::map<uint64_t, Offered> offered;
  {
    absl::MutexLock lock(&mu_);
    for (auto& [key, weak] : streams_) {
      if (auto stream = weak.lock()) streams.push_back(std::move(stream));
    }
    offered.swap(offered_);
    accepted_.clear();
  }
  for (const std::shared_ptr<Stream>& stream : streams) stream->Close(status);
}

void TransportContext::join() {
  close();
  loop_.Stop(kDrainLimit, [engine = engine_.get()] { return engine->traffic.lingering.load() == 0; });
  loop_.Join();
}

}  // namespace Atoll::transport
