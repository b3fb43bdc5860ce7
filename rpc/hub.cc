#include "atoll/rpc/hub.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/rpc/device.h"
#include "atoll/rpc/session.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {
namespace {

// Authenticated processes that have the name of another: a mistake in a launch, or a restart.
constexpr size_t kMaxVisitors = 64;
constexpr size_t kMaxReplaced = 1 << 16;

}  // namespace

Hub::Hub(const AgentOptions& options)
    : options_(options),
      limits_(options.endpoint->limits()),
      buffers_(BufferPool::Create(options.keep_buffer_bytes)) {}

// Threads.

void Hub::AttachThreads(base::ThreadPool* pool, base::ThreadPool* failures, base::Timer* timer) {
  absl::WriterMutexLock lock(&threads_mu_);
  pool_ = pool;
  failures_ = failures;
  timer_ = timer;
}

void Hub::DetachThreads() { AttachThreads(nullptr, nullptr, nullptr); }

void Hub::Schedule(base::Task task) {
  {
    absl::ReaderMutexLock lock(&threads_mu_);
    if (pool_ != nullptr) return pool_->Schedule(std::move(task));
  }
  std::move(task)();
}

void Hub::ScheduleFailure(base::Task task) {
  {
    absl::ReaderMutexLock lock(&threads_mu_);
    if (failures_ != nullptr) return failures_->Schedule(std::move(task));
  }
  std::move(task)();
}

base::Timer::Id Hub::At(absl::Time when, base::Task task) {
  absl::ReaderMutexLock lock(&threads_mu_);
  return timer_ == nullptr ? 0 : timer_->At(when, std::move(task));
}

void Hub::Cancel(base::Timer::Id id) {
  absl::ReaderMutexLock lock(&threads_mu_);
  if (timer_ != nullptr) timer_->Cancel(id);
}

// Methods.

absl::Status Hub::Register(MethodId id, Handler handler, MethodOptions options) {
  if (!ValidMethodName(id.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a method's name is at most 128 bytes of [a-z0-9_.], and this is '", id.name, "'"));
  }
  if (handler == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(MethodText(id.name, id.version), " needs a handler"));
  }
  auto method = std::make_shared<const Method>(Method{std::move(handler), std::move(options)});
  absl::MutexLock lock(&mu_);
  if (methods_.try_emplace(id, std::move(method)).second) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(MethodText(id.name, id.version), " is served already"));
}

std::shared_ptr<const Method> Hub::FindMethod(const MethodId& id, std::string* why) const {
  absl::ReaderMutexLock lock(&mu_);
  auto found = methods_.find(id);
  if (found != methods_.end()) return found->second;
  *why = absl::StrCat("it serves no method ", MethodText(id.name, id.version));
  for (const auto& [other, method] : methods_) {
    if (other.name == id.name) absl::StrAppend(why, "; it serves v", other.version);
  }
  return nullptr;
}

// Interceptors.

void Hub::AddInterceptor(std::shared_ptr<Interceptor> interceptor) {
  absl::MutexLock lock(&mu_);
  interceptors_.push_back(std::move(interceptor));
  intercepted_.store(true);
}

template <class F>
absl::Status Hub::Intercept(F see) const {
  if (!intercepted_.load(std::memory_order_acquire)) return absl::OkStatus();
  std::vector<std::shared_ptr<Interceptor>> interceptors;
  {
    absl::ReaderMutexLock lock(&mu_);
    interceptors = interceptors_;
  }
  absl::Status status;
  for (const std::shared_ptr<Interceptor>& interceptor : interceptors) {
    absl::Status guarded = Guarded("an interceptor threw", [&] { status = see(*interceptor); });
    if (status.ok()) status = guarded;
    if (!status.ok()) return status;
  }
  return status;
}

absl::Status Hub::OnCall(OutgoingCall& call) const {
  return Intercept([&](Interceptor& interceptor) { return interceptor.OnCall(call); });
}

absl::Status Hub::OnServe(ServerCall& call) const {
  return Intercept([&](Interceptor& interceptor) { return interceptor.OnServe(call); });
}

Hub::Serving::~Serving() {
  if (hub_ != nullptr && hub_->serving_.fetch_sub(1) == 1 && hub_->shutting_down()) {
    absl::MutexLock lock(&hub_->served_mu_);
  }
}

Hub::Serving Hub::BeginServing() {
  // Counted before it looks: AwaitServed, which comes after BeginShutdown, misses nobody.
  serving_.fetch_add(1);
  Serving serving(shared_from_this());
  return shutting_down() ? Serving() : std::move(serving);
}

bool Hub::AwaitServed(absl::Duration limit) {
  auto served = [this] { return serving_.load() == 0; };
  absl::MutexLock lock(&served_mu_);
  return base::AwaitFor(served_mu_, absl::Condition(&served), limit);
}

void Hub::Dispatch(Serving serving, std::shared_ptr<const Method> method, ServerCall call,
                   absl::AnyInvocable<void()> on_start) {
  base::Executor* executor = method->options.executor;
  base::Task task = [serving = std::move(serving), hub = shared_from_this(), method = std::move(method),
                     call = std::move(call), on_start = std::move(on_start)]() mutable {
    if (on_start) std::exchange(on_start, nullptr)();
    const MethodId id = call.method;
    const base::MemberId caller = call.caller;
    const std::shared_ptr<const Streams> streams = call.request.streams;
    UserCode guard(call.responder, std::move(hub));
    try {
      StreamScope scope(streams == nullptr ? Streams() : *streams);
      method->handler(std::move(call));
    } catch (...) {
      guard.Threw(absl::StrCat("the handler of ", MethodText(id.name, id.version), ", called by ",
                               caller.ToString(), ","));
    }
  };
  if (executor != nullptr) {
    executor->Schedule(std::move(task));
  } else {
    Schedule(std::move(task));
  }
}

// Peers.

std::shared_ptr<Session> Hub::FindSession(absl::string_view name) const {
  absl::ReaderMutexLock lock(&mu_);
  auto found = sessions_.find(name);
  return found == sessions_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Session>> Hub::Sessions() const {
  absl::ReaderMutexLock lock(&mu_);
  std::vector<std::shared_ptr<Session>> sessions;
  for (const auto& [name, session] : sessions_) sessions.push_back(session);
  for (const auto& [incarnation, session] : visitors_) sessions.push_back(session);
  return sessions;
}

void Hub::AddPeer(Peer peer) {
  if (peer.id.name == self().name || shutting_down()) return;
  std::shared_ptr<Session> old = FindSession(peer.id.name);
  if (old != nullptr) {
    base::Incarnation known = old->peer().id.incarnation;
    if (known == peer.id.incarnation || known == base::Incarnation() ||
        peer.id.incarnation == base::Incarnation()) {
      old->MarkAdded();
      return old->Update(peer);
    }
  }
  // One that only came, under the same name, goes on as a visitor: it may still be told why it has no place.
  const bool visits = old != nullptr && !old->added() && !old->dead();
  const base::Incarnation old_incarnation = old == nullptr ? base::Incarnation() : old->peer().id.incarnation;
  ForgetDeadVisitors();  // A visit that ended is no session to go on with.
  std::shared_ptr<Session> fresh;
  {
    absl::MutexLock lock(&mu_);
    if (replaced_.contains(peer.id.incarnation.value())) return;
    std::shared_ptr<Session>& place = sessions_[peer.id.name];
    if (place != old) return;  // Another thread was faster, and knows as much.
    if (visits && visitors_.size() < kMaxVisitors) {
      visitors_[old_incarnation.value()] = std::exchange(old, nullptr);
    } else if (old != nullptr) {
      MarkReplacedLocked(old_incarnation);
    }
    place = fresh = TakeVisitorLocked(peer.id);
  }
  fresh->MarkAdded();
  fresh->Update(peer);
  if (old != nullptr) {
    old->Die(absl::UnavailableError(absl::StrCat("it was replaced by ", peer.id.ToString())),
             /*notify=*/false,
             /*quiet=*/old->dead());
  }
}

void Hub::OnPipe(std::shared_ptr<transport::Pipe> pipe) {
  const base::MemberId member = pipe->peer().member;
  if (shutting_down()) return pipe->Close(absl::UnavailableError("it is shutting down"));
  while (true) {
    std::shared_ptr<Session> session = FindSession(member.name);
    base::Incarnation known = session == nullptr ? base::Incarnation() : session->peer().id.incarnation;
    if (session != nullptr && (known == member.incarnation || known == base::Incarnation())) {
      session->Update({member, {}});
      return session->OnAccepted(std::move(pipe));
    }
    bool held = session != nullptr && !session->dead();
    // A restarted process, most likely: its old life has to be seen to end, or be removed.
    if (held) session->Probe();
    ForgetDeadVisitors();
    std::shared_ptr<Session> visitor;
    absl::Status refused;
    {
      absl::MutexLock lock(&mu_);
      std::shared_ptr<Session>& place = sessions_[member.name];
      if (replaced_.contains(member.incarnation.value())) {
        refused = absl::FailedPreconditionError("this incarnation was replaced by a newer one");
      } else if (place != session) {
        continue;
      } else if (held && visitors_.size() >= kMaxVisitors &&
                 !visitors_.contains(member.incarnation.value())) {
        refused = absl::FailedPreconditionError(
            absl::StrCat("another incarnation of ", member.name, " is a member, and not known to be dead"));
      } else {
        visitor = TakeVisitorLocked(member);
        if (session != nullptr && !held) MarkReplacedLocked(known);
        (held ? visitors_[member.incarnation.value()] : place) = visitor;
      }
    }
    if (!refused.ok()) return pipe->Close(refused);
    return visitor->OnAccepted(std::move(pipe));
  }
}

std::shared_ptr<Session> Hub::TakeVisitorLocked(const base::MemberId& id) {
  auto found = visitors_.find(id.incarnation.value());
  if (found == visitors_.end()) return std::make_shared<Session>(shared_from_this(), Peer{id, {}});
  std::shared_ptr<Session> visitor = std::move(found->second);
  visitors_.erase(found);
  return visitor;
}

void Hub::MarkReplacedLocked(base::Incarnation incarnation) {
  if (!replaced_.insert(incarnation.value()).second) return;
  replaced_order_.push_back(incarnation.value());
  if (replaced_order_.size() <= kMaxReplaced) return;
  replaced_.erase(replaced_order_.front());
  replaced_order_.pop_front();
}

void Hub::ForgetDeadVisitors() {
  std::vector<std::pair<uint64_t, std::shared_ptr<Session>>> dead;
  {
    absl::ReaderMutexLock lock(&mu_);
    dead.assign(visitors_.begin(), visitors_.end());
  }
  // Asked without our lock: a session's comes first.
  dead.erase(std::remove_if(dead.begin(), dead.end(), [](const auto& one) { return !one.second->dead(); }),
             dead.end());
  absl::MutexLock lock(&mu_);
  for (const auto& [incarnation, session] : dead) {
    auto found = visitors_.find(incarnation);
    if (found != visitors_.end() && found->second == session) visitors_.erase(found);
  }
}

void Hub::Observe(std::function<void(const base::MemberId&, absl::Status)> observer) {
  absl::MutexLock lock(&mu_);
  observers_.push_back(std::move(observer));
}

void Hub::NotifyDead(const base::MemberId& id, const absl::Status& reason) {
  std::vector<std::function<void(const base::MemberId&, absl::Status)>> observers;
  {
    absl::MutexLock lock(&mu_);
    observers = observers_;
  }
  for (const auto& observer : observers)
    RunCallback("an observer of deaths", std::cref(observer), id, reason);
}

void Hub::OnBroken(const absl::Status& reason) {
  ATOLL_LOG(kError) << self().ToString() << " can reach nobody any more: " << reason.message();
  // What is connected later fails as fast: Connect says so too.
  for (const auto& session : Sessions()) session->Die(reason, /*notify=*/true, /*quiet=*/false);
}

void Hub::Clear() {
  absl::flat_hash_map<std::string, std::shared_ptr<Session>> sessions;
  absl::flat_hash_map<uint64_t, std::shared_ptr<Session>> visitors;
  absl::flat_hash_map<MethodId, std::shared_ptr<const Method>> methods;
  std::vector<std::function<void(const base::MemberId&, absl::Status)>> observers;
  absl::MutexLock lock(&mu_);
  sessions.swap(sessions_);
  visitors.swap(visitors_);
  methods.swap(methods_);
  observers.swap(observers_);
}

}  // namespace Atoll::rpc
