#include "atoll/rpc/agent.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/clock.h"
#include "atoll/base/fork.h"
#include "atoll/base/log.h"
#include "atoll/base/text.h"
#include "atoll/rpc/device.h"
#include "atoll/rpc/hub.h"
#include "atoll/rpc/payload.h"
#include "atoll/rpc/retry.h"
#include "atoll/rpc/self_calls.h"
#include "atoll/rpc/session.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {

namespace {

// Nobody else is there to do it: here and now, in the calling thread.
void ReturnLoansInChild(Payload payload) {
  for (OutTensor& tensor : payload.tensors) {
    if (tensor.lent && tensor.on_return) std::move(tensor.on_return)();
  }
}

}  // namespace

class AgentImpl : public Agent {
 public:
  explicit AgentImpl(const AgentOptions& options, std::unique_ptr<base::Clock> own_clock)
      : own_clock_(std::move(own_clock)),
        hub_(std::make_shared<Hub>(options)),
        self_calls_(std::make_shared<SelfCalls>(hub_)),
        pool_(std::make_unique<base::ThreadPool>(
            base::ThreadPool::Options{.name = "rpc", .threads = options.worker_threads})),
        failures_(
            std::make_unique<base::ThreadPool>(base::ThreadPool::Options{.name = "rpc-fail", .threads = 1})),
        timer_(std::make_unique<base::Timer>(options.clock)) {
    hub_->AttachThreads(pool_.get(), failures_.get(), timer_.get());
  }

  void Listen() {
    // The hub outlives every callback: the endpoint is joined before the agent ends.
    hub_->endpoint()->OnPipe(
        [hub = hub_.get()](std::shared_ptr<transport::Pipe> pipe) { hub->OnPipe(std::move(pipe)); });
    hub_->endpoint()->OnBroken([hub = hub_.get()](const absl::Status& status) { hub->OnBroken(status); });
  }

  ~AgentImpl() override {
    if (fork_mark_.in_child()) {
      base::Abandon(std::move(own_clock_));
      base::Abandon(std::shared_ptr<Hub>(hub_));
      base::Abandon(std::shared_ptr<SelfCalls>(self_calls_));
      base::Abandon(std::move(timer_));
      base::Abandon(std::move(failures_));
      base::Abandon(std::move(pool_));
      return;
    }
    Shutdown(absl::Seconds(5)).IgnoreError();
    hub_->DetachThreads();
    EndPool(std::move(failures_));
    EndPool(std::move(pool_));
    timer_ = nullptr;  // What the pools still ran may have asked for it.
  }

  absl::Status Register(MethodId method, Handler handler, MethodOptions options) override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Agent::Register"));
    return hub_->Register(std::move(method), std::move(handler), std::move(options));
  }

  void AddInterceptor(std::shared_ptr<Interceptor> interceptor) override {
    if (!fork_mark_.in_child()) hub_->AddInterceptor(std::move(interceptor));
  }

  void AddPeer(Peer peer) override {
    if (!fork_mark_.in_child()) hub_->AddPeer(std::move(peer));
  }

  void RemovePeer(const base::MemberId& id, absl::Status reason) override {
    if (fork_mark_.in_child()) return;
    std::shared_ptr<Session> session = hub_->FindSession(id.name);
    if (session == nullptr || session->peer().id != id) return;
    bool in_order = reason.ok();
    session->Die(in_order ? absl::UnavailableError("it left the job") : std::move(reason), /*notify=*/false,
                 /*quiet=*/in_order);
  }

  std::optional<Peer> FindPeer(absl::string_view name) const override {
    if (name == self().name) return Peer{self(), addresses()};
    if (fork_mark_.in_child()) return std::nullopt;
    std::shared_ptr<Session> session = hub_->FindSession(name);
    if (session == nullptr || session->dead()) return std::nullopt;
    return session->peer();
  }

  base::Future<base::MemberId> Meet(std::vector<std::string> addresses, absl::Duration limit) override {
    base::Promise<base::MemberId> promise;
    if (fork_mark_.in_child()) {
      promise.Set(fork_mark_.Error("Agent::Meet"));
      return promise.future();
    }
    if (hub_->shutting_down()) {
      promise.Set(absl::CancelledError("this agent is shut down"));
      return promise.future();
    }
    base::MemberId anybody;
    hub_->endpoint()->Connect(
        addresses, anybody, transport::Lane::kControl, limit,
        [promise, addresses, hub = hub_](absl::StatusOr<std::shared_ptr<transport::Pipe>> pipe) {
          absl::StatusOr<base::MemberId> met = base::MemberId();
          if (!pipe.ok()) {
            met = pipe.status();
          } else {
            met = (*pipe)->peer().member;
            (*pipe)->Close(absl::CancelledError("met"));
            hub->AddPeer({*met, addresses});
          }
          hub->ScheduleFailure([promise, met = std::move(met)] {
            RunCallback("what goes on with a meeting", [&] { promise.Set(met); });
          });
        });
    return promise.future();
  }

  void OnPeerDead(std::function<void(const base::MemberId&, absl::Status)> observer) override {
    if (!fork_mark_.in_child()) hub_->Observe(std::move(observer));
  }

  void Call(absl::string_view to, const MethodId& method, Payload request, CallOptions options,
            OnReply on_reply) override {
    if (on_reply == nullptr) on_reply = [](const absl::StatusOr<Received>&) {};
    if (fork_mark_.in_child()) {
      ReturnLoansInChild(std::move(request));
      return std::move(on_reply)(ErrorInChild("Agent::Call", to, method));
    }
    if (!options.timeout.has_value()) options.timeout = hub_->options().call_timeout;
    if (options.retry.has_value()) {
      return CallWithRetry(this, to, method, std::move(request), std::move(options), std::move(on_reply));
    }
    OutgoingCall outgoing{to, method, /*one_way=*/false, request, options, on_reply};
    absl::Status refused = hub_->OnCall(outgoing);
    if (!options.timeout.has_value()) options.timeout = hub_->options().call_timeout;
    if (!refused.ok()) {
      // As it is.
    } else if (hub_->shutting_down()) {
      refused = absl::CancelledError("this agent is shut down");
    } else if (*options.timeout <= absl::ZeroDuration()) {
      refused = absl::DeadlineExceededError("its time had passed before it was made");
    } else if (to == self().name) {
      return self_calls_->Call(method, std::move(request), std::move(options), std::move(on_reply));
    } else if (std::shared_ptr<Session> session = hub_->FindSession(to)) {
      return session->Call(method, std::move(request), std::move(options), std::move(on_reply));
    } else {
      refused = NoSuchMember();
    }
    refused = Explain(refused, to, method);
    ReturnLoans(hub_, std::move(request));
    hub_->ScheduleFailure([on_reply = std::move(on_reply), refused = std::move(refused)]() mutable {
      RunCallback(kOnReply, std::move(on_reply), std::move(refused));
    });
  }
  using Agent::Call;

  base::Future<base::Unit> Send(absl::string_view to, const MethodId& method, Payload request) override {
    base::Promise<base::Unit> promise;
    if (fork_mark_.in_child()) {
      ReturnLoansInChild(std::move(request));
      promise.Set(ErrorInChild("Agent::Send", to, method));
      return promise.future();
    }
    auto done = [promise, hub = hub_](absl::Status status) {
      static constexpr absl::string_view kWhat = "what goes on with a one-way call";
      if (status.ok()) {
        CallbackExecutor guarded(hub->executor(), kWhat);
        promise.SetOn(&guarded, base::Unit{});
        return;
      }
      hub->ScheduleFailure(
          [promise, status = std::move(status)] { RunCallback(kWhat, [&] { promise.Set(status); }); });
    };
    CallOptions options;
    OnReply none;
    OutgoingCall outgoing{to, method, /*one_way=*/true, request, options, none};
    if (absl::Status refused = hub_->OnCall(outgoing); !refused.ok()) {
      ReturnLoans(hub_, std::move(request));
      done(Explain(refused, to, method));
    } else if (hub_->shutting_down()) {
      ReturnLoans(hub_, std::move(request));
      done(Explain(absl::CancelledError("this agent is shut down"), to, method));
    } else if (to == self().name) {
      self_calls_->Send(method, std::move(request), std::move(done));
    } else if (std::shared_ptr<Session> session = hub_->FindSession(to)) {
      session->Send(method, std::move(request), std::move(done));
    } else {
      ReturnLoans(hub_, std::move(request));
      done(Explain(NoSuchMember(), to, method));
    }
    return promise.future();
  }

  absl::Status NoSuchMember() const {
    return absl::NotFoundError(absl::StrCat("no such member: ", self().ToString(), " does not know it"));
  }

  const base::MemberId& self() const override { return hub_->self(); }
  std::vector<std::string> addresses() const override { return hub_->endpoint()->addresses(); }
  base::Executor* pool() override { return hub_->executor(); }
  absl::Time LastHeard(const base::MemberId& id) const override {
    if (fork_mark_.in_child()) return absl::InfinitePast();
    std::shared_ptr<Session> session = hub_->FindSession(id.name);
    return session == nullptr ? absl::InfinitePast() : session->LastHeard(id.incarnation);
  }
  base::Timer* timer() override { return timer_.get(); }
  const base::Clock* clock() const override { return hub_->options().clock; }
  transport::Endpoint* endpoint() override { return hub_->endpoint(); }

  absl::Status Shutdown(absl::Duration limit) override {
    ATOLL_RETURN_IF_ERROR(fork_mark_.Check("Agent::Shutdown"));
    absl::MutexLock lock(&shutdown_mu_);
    if (shut_down_) return absl::OkStatus();
    shut_down_ = true;
    const absl::Time deadline = base::Now() + limit;
    auto left = [deadline](absl::Duration least = absl::ZeroDuration()) {
      return std::max(deadline - base::Now(), least);
    };
    hub_->BeginShutdown();
    std::vector<std::string> leftover;
    // What runs still answers, and its answers are sent below. What waits for others may need their end first.
    bool served = hub_->AwaitServed(limit / 2);
    std::vector<std::shared_ptr<Session>> sessions = hub_->Sessions();
    for (const auto& session : sessions) {
      if (!session->AwaitDrained(left())) leftover.push_back(session->Leftover());
    }
    // Peers close the pipes when they read the farewell: closing first could destroy what is under way.
    for (const auto& session : sessions) session->SayBye();
    const absl::Time closed_by = base::Now() + kFarewellLimit;
    for (const auto& session : sessions) {
      session->AwaitClosed(std::max(closed_by - base::Now(), absl::ZeroDuration()));
    }
    absl::Status reason = absl::CancelledError("this agent was shut down");
    for (const auto& session : sessions) session->Die(reason, /*notify=*/false, /*quiet=*/true);
    self_calls_->FailAll(reason);
    hub_->endpoint()->Close();
    hub_->endpoint()->Join();
    // A session may have come in between.
    for (const auto& session : hub_->Sessions()) session->Die(reason, /*notify=*/false, /*quiet=*/true);
    served =
        pool_->Drain(left(absl::Milliseconds(100))) && (served || hub_->AwaitServed(absl::ZeroDuration()));
    if (!served) leftover.push_back("handlers that still run");
    failures_->Drain(left(absl::Milliseconds(100)));
    hub_->Clear();
    if (leftover.empty()) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat("dropped at the end of ", base::DurationText(limit), ": ",
                                                    absl::StrJoin(leftover, "; ")));
  }

 private:
  static constexpr absl::Duration kFarewellLimit = absl::Milliseconds(500);

  // A pool whose threads hang in user code is left to a thread that waits for them.
  static void EndPool(std::unique_ptr<base::ThreadPool> pool) {
    if (pool->Drain(absl::Milliseconds(100))) return;
    ATOLL_LOG(kWarning) << "a handler still runs after the agent's end";
    std::thread([pool = std::move(pool)]() mutable { pool = nullptr; }).detach();
  }

  static absl::Status Explain(const absl::Status& status, absl::string_view to, const MethodId& method) {
    return base::WithRan(
        absl::Status(status.code(), absl::StrCat("calling ", MethodText(method.name, method.version), " on ",
                                                 to, ": ", status.message(), " (ran: no)")),
        base::Ran::kNo);
  }

  absl::Status ErrorInChild(absl::string_view what, absl::string_view to, const MethodId& method) const {
    return fork_mark_.Error(
        absl::StrCat(what, "(", MethodText(method.name, method.version), " on ", to, ")"));
  }

  const base::ForkMark fork_mark_;
  std::unique_ptr<base::Clock> own_clock_;
  const std::shared_ptr<Hub> hub_;
  const std::shared_ptr<SelfCalls> self_calls_;
  std::unique_ptr<base::ThreadPool> pool_;
  std::unique_ptr<base::ThreadPool> failures_;
  std::unique_ptr<base::Timer> timer_;
  absl::Mutex shutdown_mu_;
  bool shut_down_ ABSL_GUARDED_BY(shutdown_mu_) = false;
};

absl::StatusOr<std::unique_ptr<Agent>> Agent::Start(AgentOptions options) {
  if (options.endpoint == nullptr) return absl::InvalidArgumentError("an agent needs an endpoint");
  if (options.self.name.empty() || options.self.incarnation == base::Incarnation()) {
    return absl::InvalidArgumentError("an agent needs a name and an incarnation");
  }
  if (options.worker_threads < 1 || options.worker_threads > 256) {
    return absl::InvalidArgumentError("worker_threads is 1 to 256");
  }
  if (options.window_bytes == 0 || options.queue_bytes == 0 || options.backlog_bytes == 0) {
    return absl::InvalidArgumentError("window_bytes, queue_bytes and backlog_bytes must not be 0");
  }
  if (options.stall_limit <= absl::ZeroDuration() || options.reconnect_limit <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("stall_limit and reconnect_limit must be more than zero");
  }
  if (options.call_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("call_timeout must be more than zero");
  }
  if (options.max_calls_in_flight == 0 || options.max_calls_served == 0) {
    return absl::InvalidArgumentError("max_calls_in_flight and max_calls_served must not be 0");
  }
  if (const size_t header = options.endpoint->limits().max_header_bytes; header < kMinHeaderLimit) {
    return absl::InvalidArgumentError(absl::StrCat("an endpoint for headers of ", header,
                                                   " bytes: an agent needs at least ", kMinHeaderLimit));
  }
  ATOLL_RETURN_IF_ERROR(CheckDeviceMaps(options.device_maps, GpuCount()));
  std::unique_ptr<base::Clock> own_clock;
  if (options.clock == nullptr) {
    own_clock = std::make_unique<base::RealClock>();
    options.clock = own_clock.get();
  }
  auto agent = std::make_unique<AgentImpl>(options, std::move(own_clock));
  agent->Listen();
  return std::unique_ptr<Agent>(std::move(agent));
}

base::Future<Received> Agent::Call(absl::string_view to, const MethodId& method, Payload request,
                                   CallOptions options) {
  base::Promise<Received> promise;
  options.reply_inline = true;
  Call(to, method, std::move(request), std::move(options),
       [promise, pool = pool()](absl::StatusOr<Received> result) {
         CallbackExecutor guarded(pool, kOnReply);
         promise.SetOn(&guarded, std::move(result));
       });
  return promise.future();
}

}  // namespace Atoll::rpc
