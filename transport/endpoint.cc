#include "atoll/transport/endpoint.h"

#include <deque>
#include <exception>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/fork.h"
#include "atoll/base/log.h"
#include "atoll/base/status.h"
#include "atoll/base/words.h"
#include "atoll/transport/dialer.h"
#include "atoll/transport/pipe_impl.h"
#include "atoll/transport/resolver.h"
#include "atoll/transport/transport_context.h"

namespace Atoll::transport {
namespace {

constexpr absl::string_view kUnixPrefix = "unix:";

bool HasUnixPrefix(absl::string_view text) { return absl::StartsWith(text, kUnixPrefix); }

/// What peers must have in common beside the protocol's version. Which channels are viable on a machine is
/// not part of it (a GPU's owner may be on the CPU alone); the order of those that both have is.
std::string Fingerprint(base::TlsMode tls) {
  std::string text = absl::StrCat("torch ", ATOLL_TORCH_VERSION, ", transport ", kTransportDomain,
                                  ", channels cuda*,cma,mpt", kLanes, ",basic");
  if (tls != base::TlsMode::kNone) absl::StrAppend(&text, ", tls ", base::TlsModeName(tls));
  return text;
}

absl::Status CheckOptions(const EndpointOptions& options) {
  if (options.key.bytes.size() < 16 || options.key.bytes.size() > 4096) {
    return absl::InvalidArgumentError("the job key must have 16 to 4,096 bytes");
  }
  if (options.job.empty() || options.job.size() > 256)
    return absl::InvalidArgumentError("a job's id has 1 to 256 bytes");
  if (!base::IsWord(options.self.name, base::kMaxMemberNameBytes))
    return absl::InvalidArgumentError(absl::StrCat("a member's name is 1 to ", base::kMaxMemberNameBytes, " ",
                                                   base::kWordLetters, ", and this is '",
                                                   absl::CHexEscape(options.self.name), "'"));
  if (options.self.incarnation.value() == 0) return absl::InvalidArgumentError("incarnation 0 is nobody's");
  if (options.port < 0 || options.port > 65535 || options.port_count < 1 ||
      options.port_count > 65536 - options.port) {
    return absl::InvalidArgumentError(absl::StrCat("port ", options.port, " and ", options.port_count,
                                                   " in all: a port is 0 to 65535, and at least one is "
                                                   "tried"));
  }
  if (options.max_unauthenticated < 1)
    return absl::InvalidArgumentError("max_unauthenticated must be 1 or more");
  if (options.handshake_limit <= absl::ZeroDuration())
    return absl::InvalidArgumentError("handshake_limit must be above 0");
  if (options.max_header_bytes < 1 || options.max_tensors < 1 || options.max_tensor_bytes < 1) {
    return absl::InvalidArgumentError("max_header_bytes, max_tensors and max_tensor_bytes must be 1 or more");
  }
  return base::CheckTlsOptions(options.tls);
}

/// For a context whose destructor would wait for ever. Its threads go on, so it stays until the process ends.
void GiveUp(std::shared_ptr<tensorpipe::Context> core) {
  struct Graveyard {
    absl::Mutex mu;
    std::vector<std::shared_ptr<tensorpipe::Context>> cores ABSL_GUARDED_BY(mu);
  };
  static Graveyard* const graveyard = new Graveyard;
  absl::MutexLock lock(&graveyard->mu);
  graveyard->cores.push_back(std::move(core));
}

class EndpointImpl final : public Endpoint {
 public:
  explicit EndpointImpl(EndpointOptions options) : options_(std::move(options)) {}
  /// Not in a child of fork: there the object is left alone.
  ~EndpointImpl() override {
    Close();
    Join();
  }
  absl::Status Start();
  bool in_child() const { return fork_mark_.in_child(); }

  std::vector<std::string> addresses() const override { return addresses_; }
  int port() const override { return bound_.port(); }
  MessageLimits limits() const override {
    return {options_.max_header_bytes, options_.max_tensors, options_.max_tensor_bytes};
  }
  void OnPipe(absl::AnyInvocable<void(std::shared_ptr<Pipe>)> on_pipe) override;
  void Connect(std::vector<std::string> addresses, base::MemberId expected, Lane lane, absl::Duration limit,
               absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Pipe>>)> done) override;
  void OnBroken(absl::AnyInvocable<void(absl::Status)> on_broken) override;
  void Defer(absl::AnyInvocable<void()> task) override {
    if (!in_child()) engine_->loop->Defer(std::move(task));
  }
  Counters counters() const override;
  void Close() override;
  void Join() override;

 private:
  void BreakOnLoop(absl::string_view why);
  bool broken() const {
    absl::MutexLock lock(&mu_);
    return !broken_.ok();
  }
  /// Why nothing can be connected any more; OK until then.
  absl::Status Ended() const;
  void MakeCore();
  void ListAddresses(bool with_unix, const SocketAddress& unix_address);
  void AcceptNext();
  void OnAccepted(std::shared_ptr<tensorpipe::Pipe> pipe);
  /// False if the endpoint has ended, and the dialer with it.
  bool AdmitOnLoop(const std::shared_ptr<Dialer>& dialer);

  const base::ForkMark fork_mark_;
  const EndpointOptions options_;
  SocketAddress bound_;
  std::vector<std::string> addresses_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<TransportContext> transport_;
  std::shared_ptr<ChannelTable> channels_;
  std::shared_ptr<PipeShared> shared_;
  std::shared_ptr<tensorpipe::Context> core_;
  std::shared_ptr<tensorpipe::Listener> listener_;
  std::set<std::shared_ptr<Dialer>> dialers_;  // Loop only.

  mutable absl::Mutex mu_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status broken_ ABSL_GUARDED_BY(mu_);  // OK: it is not.
  bool on_pipe_set_ ABSL_GUARDED_BY(mu_) = false;
  Resolver resolver_;
  absl::AnyInvocable<void(std::shared_ptr<Pipe>)> on_pipe_;  // Loop only.
  std::deque<std::shared_ptr<Pipe>> waiting_;                // Loop only.
  absl::AnyInvocable<void(absl::Status)> on_broken_;         // Loop only.
  bool ready_ = false;                                       // Loop only: on_pipe_ is there.
};

absl::Status EndpointImpl::Start() {
  ATOLL_RETURN_IF_ERROR(CheckOptions(options_));
  TransportContext::Options transport;
  if (options_.tls.mode != base::TlsMode::kNone) {
    ATOLL_ASSIGN_OR_RETURN(transport.tls, TlsContext::Create(options_.tls, options_.key.bytes));
  }
  ATOLL_ASSIGN_OR_RETURN(const std::vector<SocketAddress> candidates, ResolveBind(options_.bind));
  ATOLL_ASSIGN_OR_RETURN(
      Fd tcp, ListenTcp(candidates, {options_.port, options_.port_count, options_.last_port}, &bound_));
  const SocketAddress unix_address = UnixAddressOf(options_.job, options_.self);
  Fd unix_socket;
  if (options_.enable_unix) {
    ATOLL_ASSIGN_OR_RETURN(unix_socket, ListenUnix(unix_address));
  }
  engine_ = std::make_shared<Engine>();
  ATOLL_ASSIGN_OR_RETURN(engine_->loop, Loop::Create("atoll-transport", options_.clock));
  engine_->loop->OnException([this](const char* what) { BreakOnLoop(what); });
  transport.handshake.job = options_.job;
  transport.handshake.self = options_.self;
  transport.handshake.key = options_.key.bytes;
  transport.handshake.fingerprint = Fingerprint(options_.tls.mode);
  transport.handshake.tls = options_.tls.mode;
  transport.handshake_limit = options_.handshake_limit;
  transport.max_unauthenticated = options_.max_unauthenticated;
  transport.limits = limits();
  transport_ = std::make_shared<TransportContext>(engine_, transport);
  shared_ = std::make_shared<PipeShared>();
  shared_->fork_mark = fork_mark_;
  shared_->engine = engine_;
  shared_->limits = transport.limits;
  if (options_.enable_cuda) {
    shared_->cuda = LoadCudaPlugin(&shared_->no_cuda, options_.cuda_library);
  } else {
    shared_->no_cuda = "this endpoint was told to do without (enable_cuda)";
  }
  try {
    MakeCore();
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("TensorPipe does not start: ", error.what()));
  }
  ListAddresses(unix_socket.valid(), unix_address);
  ATOLL_RETURN_IF_ERROR(transport_->Serve(std::move(tcp), bound_));
  if (unix_socket.valid()) ATOLL_RETURN_IF_ERROR(transport_->Serve(std::move(unix_socket), unix_address));
  return absl::OkStatus();
}

// TensorPipe, or a callback inside it, threw. Its context is stuck from then on: it runs nothing, not even
// its own end. So every connection is cut, what waits is ended here, and Join does not wait for it.
void EndpointImpl::BreakOnLoop(absl::string_view why) {
  const absl::Status status = absl::InternalError(absl::StrCat("the endpoint is broken: ", why));
  {
    absl::MutexLock lock(&mu_);
    if (!broken_.ok()) return;
    broken_ = status;
  }
  if (transport_ == nullptr) return;
  transport_->close();
  const std::set<std::shared_ptr<Dialer>> dialers = dialers_;
  for (const auto& dialer : dialers) dialer->Abort(status);
  // Streams give back what they were lent in the two turns that follow.
  engine_->loop->Defer([this, status] {
    engine_->loop->Defer([this, status] {
      shared_->pipes->GiveUpOnLoop(status);
      if (on_broken_) std::exchange(on_broken_, nullptr)(status);
    });
  });
}

void EndpointImpl::OnBroken(absl::AnyInvocable<void(absl::Status)> on_broken) {
  if (in_child()) return;
  engine_->loop->Defer([this, on_broken = std::move(on_broken)]() mutable {
    absl::Status broken;
    {
      absl::MutexLock lock(&mu_);
      broken = broken_;
    }
    if (!broken.ok()) return std::move(on_broken)(broken);
    on_broken_ = std::move(on_broken);
  });
}

absl::Status EndpointImpl::Ended() const {
  absl::MutexLock lock(&mu_);
  if (!broken_.ok()) return broken_;
  return closed_ ? absl::CancelledError("the endpoint is closed") : absl::OkStatus();
}

void EndpointImpl::MakeCore() {
  core_ = std::make_shared<tensorpipe::Context>(tensorpipe::ContextOptions().name(options_.self.ToString()));
  core_->registerTransport(1, kTransportName, transport_);
  channels_ = std::make_shared<ChannelTable>();
  auto basic = tensorpipe::channel::basic::create();
  if (shared_->cuda != nullptr) {
    for (auto& [name, channel] : shared_->cuda->MakeChannels(basic)) {
      // InfiniBand goes past TCP, and past TLS.
      if (options_.tls.mode != base::TlsMode::kNone && name == "cuda_gdr") continue;
      channels_->Add(name, std::move(channel));
    }
  }
  if (options_.enable_cma) channels_->Add("cma", tensorpipe::channel::cma::create());
  if (options_.enable_mpt) {
    std::vector<std::shared_ptr<tensorpipe::transport::Context>> lane_contexts(kLanes, transport_);
    std::vector<std::shared_ptr<tensorpipe::transport::Listener>> lane_listeners;
    for (int i = 1; i <= kLanes; ++i) lane_listeners.push_back(transport_->listen(absl::StrCat("lane/", i)));
    channels_->Add("mpt", tensorpipe::channel::mpt::create(lane_contexts, lane_listeners));
  }
  channels_->Add("basic", std::move(basic));
  channels_->RegisterWith(*core_);
  transport_->SetChannels(channels_);
  listener_ = core_->listen({absl::StrCat(kTransportName, "://lane/0")});
  AcceptNext();
}

void EndpointImpl::ListAddresses(bool with_unix, const SocketAddress& unix_address) {
  if (with_unix) addresses_.push_back(unix_address.ToString());
  if (!IsWildcard(bound_)) {
    addresses_.push_back(bound_.ToString());
    return;
  }
  std::vector<SocketAddress> local = LocalAddresses(AF_INET);
  if (bound_.family() == AF_INET6) {
    std::vector<SocketAddress> v6 = LocalAddresses(AF_INET6);
    local.insert(local.end(), v6.begin(), v6.end());
  }
  for (const SocketAddress& address :
       Reachable(bound_, std::move(local), kMaxAddresses - addresses_.size())) {
    addresses_.push_back(address.ToString());
  }
}

void EndpointImpl::AcceptNext() {
  listener_->accept([this](const tensorpipe::Error& error, std::shared_ptr<tensorpipe::Pipe> pipe) {
    if (error) return;  // Closed.
    OnAccepted(std::move(pipe));
    AcceptNext();
  });
}

void EndpointImpl::OnAccepted(std::shared_ptr<tensorpipe::Pipe> pipe) {
  std::shared_ptr<Link> link = transport_->TakeLink(pipe->getRemoteName());
  if (link == nullptr) return;  // We are closing.
  auto accepted = std::make_shared<PipeImpl>(shared_, std::move(pipe), std::move(link));
  engine_->loop->Defer([this, accepted = std::move(accepted)]() mutable {
    if (ready_) return on_pipe_(std::move(accepted));
    waiting_.push_back(std::move(accepted));
  });
}

void EndpointImpl::OnPipe(absl::AnyInvocable<void(std::shared_ptr<Pipe>)> on_pipe) {
  if (in_child()) return;
  {
    absl::MutexLock lock(&mu_);
    ATOLL_CHECK(!on_pipe_set_) << "OnPipe is called once";
    on_pipe_set_ = true;
  }
  engine_->loop->Defer([this, on_pipe = std::move(on_pipe)]() mutable {
    on_pipe_ = std::move(on_pipe);
    ready_ = true;
    while (!waiting_.empty()) {
      std::shared_ptr<Pipe> pipe = std::move(waiting_.front());
      waiting_.pop_front();
      on_pipe_(std::move(pipe));
    }
  });
}

void EndpointImpl::Connect(std::vector<std::string> addresses, base::MemberId expected, Lane lane,
                           absl::Duration limit,
                           absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Pipe>>)> done) {
  if (in_child()) return std::move(done)(fork_mark_.Error("Endpoint::Connect"));
  const absl::Time deadline = engine_->loop->Now() + limit;
  auto open = [this](const std::string& url,
                     std::shared_ptr<Link> link) -> absl::StatusOr<std::shared_ptr<Pipe>> {
    try {
      return std::make_shared<PipeImpl>(shared_, core_->connect(url), std::move(link));
    } catch (const std::exception& error) {
      return absl::InternalError(absl::StrCat("TensorPipe does not connect: ", error.what()));
    }
  };
  auto dialer =
      std::make_shared<Dialer>(transport_, std::move(expected), lane, deadline, open, std::move(done));
  if (!options_.enable_unix) std::erase_if(addresses, HasUnixPrefix);
  Resolver::Result literal;
  if (Resolver::Literal(addresses, &literal)) {
    engine_->loop->Defer([this, dialer = std::move(dialer), literal = std::move(literal)]() mutable {
      if (AdmitOnLoop(dialer)) dialer->Start(std::move(literal));
    });
    return;
  }
  // Asking takes seconds, which neither the loop nor the caller has; `limit` ends it too.
  engine_->loop->Defer([this, dialer, addresses] {
    if (AdmitOnLoop(dialer)) dialer->AwaitNames(absl::StrJoin(addresses, ", "));
  });
  // It may outlive this.
  resolver_.Resolve(std::move(addresses), [engine = engine_,
                                           dialer = std::move(dialer)](Resolver::Result found) {
    engine->loop->Defer([dialer, found = std::move(found)]() mutable { dialer->Start(std::move(found)); });
  });
}

bool EndpointImpl::AdmitOnLoop(const std::shared_ptr<Dialer>& dialer) {
  if (absl::Status ended = Ended(); !ended.ok()) {
    dialer->Abort(std::move(ended));
    return false;
  }
  dialers_.insert(dialer);
  dialer->OnDone([this, dialer = dialer.get()] {
    std::erase_if(dialers_, [&](const auto& entry) { return entry.get() == dialer; });
  });
  return true;
}

Endpoint::Counters EndpointImpl::counters() const {
  const Traffic& traffic = engine_->traffic;
  return {traffic.accepted.load(), traffic.authenticated.load(), traffic.refused.load(),
          traffic.bytes_sent.load(), traffic.bytes_received.load()};
}

void EndpointImpl::Close() {
  if (in_child()) return;
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
    closed_ = true;
  }
  resolver_.Close();
  if (core_ == nullptr) return;
  engine_->loop->Defer([this] {
    const std::set<std::shared_ptr<Dialer>> dialers = dialers_;
    for (const auto& dialer : dialers) dialer->Abort(absl::CancelledError("the endpoint is closed"));
    std::deque<std::shared_ptr<Pipe>> waiting;
    waiting.swap(waiting_);
    waiting.clear();
    if (!broken()) core_->close();
  });
}

void EndpointImpl::Join() {
  if (in_child()) return;
  if (engine_ == nullptr || engine_->loop == nullptr) return;
  if (core_ != nullptr && !broken()) core_->join();
  transport_->join();
  // The loop used it to its end.
  if (core_ != nullptr && broken()) GiveUp(std::move(core_));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Endpoint>> CreateEndpoint(EndpointOptions options) {
  std::shared_ptr<EndpointImpl> endpoint(new EndpointImpl(std::move(options)), [](EndpointImpl* unused) {
    if (!unused->in_child()) delete unused;
  });
  absl::Status status = endpoint->Start();
  if (!status.ok()) return status;
  return endpoint;
}

}  // namespace Atoll::transport
