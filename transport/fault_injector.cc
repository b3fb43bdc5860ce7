#include "atoll/transport/fault_injector.h"

#include <deque>
#include <random>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/clock.h"

namespace Atoll::transport {

uint64_t FaultCounts::total() const { return drop + delay + repeat + reorder + cut + half_open + stall; }

namespace {

enum class Fault { kNone, kDrop, kDelay, kRepeat, kReorder, kCut, kHalfOpen, kStall };

/// The dice, which all pipes of an endpoint throw, and the thread that brings what is late.
class Faults {
 public:
  explicit Faults(FaultPlan plan)
      : plan_(plan), random_(plan.seed), timer_(std::make_unique<base::Timer>(&clock_)) {}

  Fault Throw(bool first) {
    absl::MutexLock lock(&mu_);
    double at = std::uniform_real_distribution<double>(0, 1)(random_);
    const auto meets = [&at](double chance) {
      const bool is = at < chance;
      at -= chance;
      return is && chance > 0;
    };
    const auto count = [](Fault fault, std::atomic<uint64_t>& counter) {
      ++counter;
      return fault;
    };
    if (meets(plan_.drop)) return count(Fault::kDrop, counts.drop);
    if (meets(plan_.delay)) return count(Fault::kDelay, counts.delay);
    if (meets(plan_.cut)) return count(Fault::kCut, counts.cut);
    if (meets(plan_.half_open)) return count(Fault::kHalfOpen, counts.half_open);
    if (meets(plan_.stall)) return count(Fault::kStall, counts.stall);
    if (first) return Fault::kNone;
    if (meets(plan_.repeat)) return count(Fault::kRepeat, counts.repeat);
    if (meets(plan_.reorder)) return count(Fault::kReorder, counts.reorder);
    return Fault::kNone;
  }
  FaultPlan plan() const {
    absl::MutexLock lock(&mu_);
    return plan_;
  }
  void SetPlan(FaultPlan plan) {
    absl::MutexLock lock(&mu_);
    plan_ = plan;
  }
  void After(absl::Duration delay, base::Task task) {
    {
      absl::MutexLock lock(&mu_);
      if (timer_ != nullptr) {
        timer_->At(clock_.Now() + delay, std::move(task));
        return;
      }
    }
    std::move(task)();  // The endpoint has ended.
  }
  /// Ends the thread. A task on it may hold the last pipe, and with that this: it must not be this that ends it.
  void Stop() {
    std::unique_ptr<base::Timer> timer;
    {
      absl::MutexLock lock(&mu_);
      timer = std::move(timer_);
    }
  }

  FaultCounts counts;

 private:
  mutable absl::Mutex mu_;
  FaultPlan plan_ ABSL_GUARDED_BY(mu_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  base::RealClock clock_;
  std::unique_ptr<base::Timer> timer_ ABSL_GUARDED_BY(mu_);
};

class FaultyPipe : public Pipe, public std::enable_shared_from_this<FaultyPipe> {
 public:
  using OnDone = absl::AnyInvocable<void(absl::Status)>;
  using OnDescriptor = absl::AnyInvocable<void(absl::StatusOr<Descriptor>)>;

  FaultyPipe(std::shared_ptr<Pipe> inner, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}
  ~FaultyPipe() override { Close(absl::CancelledError("the pipe was let go")); }

  void Write(Message message, OnDone done) override {
    Fault fault = Fault::kNone;
    std::deque<Held> overtaken;
    {
      absl::MutexLock lock(&mu_);
      if (half_open_ && !closed_) {
        fault = Fault::kDrop;
      } else if (!closed_) {
        fault = faults_->Throw(!std::exchange(written_, true));
        if (fault == Fault::kHalfOpen) half_open_ = true;
      }
      const bool waits = fault == Fault::kDelay || fault == Fault::kStall;
      if (fault == Fault::kReorder && held_.empty()) {
        held_.push_back({std::move(message), std::move(done)});
        overtakes_ = true;
        return ReleaseLater(faults_->plan().delay_by);
      }
      if (waits || (!held_.empty() && !overtakes_ && fault != Fault::kDrop && fault != Fault::kHalfOpen)) {
        held_.push_back({std::move(message), std::move(done)});
        if (!waits) return;
        overtakes_ = false;
        return ReleaseLater(fault == Fault::kStall ? faults_->plan().stall_for : faults_->plan().delay_by);
      }
      if (std::exchange(overtakes_, false)) overtaken.swap(held_);
    }
    switch (fault) {
      case Fault::kDrop:
      case Fault::kHalfOpen:
        std::move(done)(absl::OkStatus());
        break;
      case Fault::kCut:
        inner_->Close(absl::UnavailableError("an injected fault: cut"));
        inner_->Write(std::move(message), std::move(done));
        break;
      case Fault::kRepeat:
        inner_->Write(message, [](absl::Status) {});
        inner_->Write(std::move(message), std::move(done));
        break;
      default:
        inner_->Write(std::move(message), std::move(done));
    }
    Send(std::move(overtaken));
  }

  void ReadDescriptor(OnDescriptor done) override {
    inner_->ReadDescriptor(
        [self = shared_from_this(), done = std::move(done)](absl::StatusOr<Descriptor> descriptor) mutable {
          {
            absl::MutexLock lock(&self->mu_);
            if (self->half_open_ && !self->closed_) {
              self->unread_ = std::move(done);
              return;
            }
          }
          std::move(done)(std::move(descriptor));
        });
  }

  void Read(std::vector<Buffer> into, OnDone done) override {
    inner_->Read(std::move(into), std::move(done));
  }

  void Close(absl::Status reason) override {
    std::deque<Held> held;
    OnDescriptor unread;
    {
      absl::MutexLock lock(&mu_);
      if (std::exchange(closed_, true)) return;
      held.swap(held_);
      unread = std::exchange(unread_, nullptr);
    }
    inner_->Close(reason);
    Send(std::move(held));  // Each is told the reason.
    if (!unread) return;
    faults_->After(absl::ZeroDuration(),
                   [unread = std::move(unread), reason]() mutable { std::move(unread)(reason); });
  }

  const PeerInfo& peer() const override { return inner_->peer(); }
  bool Reaches(Device ours, Device theirs) const override { return inner_->Reaches(ours, theirs); }

 private:
  struct Held {
    Message message;
    OnDone done;
  };

  void ReleaseLater(absl::Duration delay) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    faults_->After(delay, [weak = weak_from_this()] {
      auto self = weak.lock();
      if (self == nullptr) return;
      std::deque<Held> held;
      {
        absl::MutexLock lock(&self->mu_);
        if (self->closed_) return;
        self->overtakes_ = false;
        held.swap(self->held_);
      }
      self->Send(std::move(held));
    });
  }

  void Send(std::deque<Held> held) {
    for (Held& each : held) inner_->Write(std::move(each.message), std::move(each.done));
  }

  const std::shared_ptr<Pipe> inner_;
  const std::shared_ptr<Faults> faults_;
  absl::Mutex mu_;
  bool written_ ABSL_GUARDED_BY(mu_) = false;
  bool half_open_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool overtakes_ ABSL_GUARDED_BY(mu_) = false;  // What is held waits for one to overtake it, no longer.
  std::deque<Held> held_ ABSL_GUARDED_BY(mu_);
  OnDescriptor unread_ ABSL_GUARDED_BY(mu_);
};

class FaultInjectorImpl : public FaultInjector {
 public:
  FaultInjectorImpl(std::shared_ptr<Endpoint> inner, FaultPlan plan)
      : inner_(std::move(inner)), faults_(std::make_shared<Faults>(plan)) {}
  ~FaultInjectorImpl() override {
    Close();
    Join();
    faults_->Stop();
  }

  std::vector<std::string> addresses() const override { return inner_->addresses(); }
  int port() const override { return inner_->port(); }
  MessageLimits limits() const override { return inner_->limits(); }
  void OnPipe(absl::AnyInvocable<void(std::shared_ptr<Pipe>)> on_pipe) override {
    inner_->OnPipe([faults = faults_, on_pipe = std::move(on_pipe)](std::shared_ptr<Pipe> pipe) mutable {
      on_pipe(std::make_shared<FaultyPipe>(std::move(pipe), faults));
    });
  }
  void OnBroken(absl::AnyInvocable<void(absl::Status)> on_broken) override {
    inner_->OnBroken(std::move(on_broken));
  }
  void Connect(std::vector<std::string> addresses, base::MemberId expected, Lane lane, absl::Duration limit,
               absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Pipe>>)> done) override {
    inner_->Connect(
        std::move(addresses), std::move(expected), lane, limit,
        [faults = faults_, done = std::move(done)](absl::StatusOr<std::shared_ptr<Pipe>> pipe) mutable {
          if (pipe.ok()) pipe = std::make_shared<FaultyPipe>(*std::move(pipe), faults);
          std::move(done)(std::move(pipe));
        });
  }
  void Defer(absl::AnyInvocable<void()> task) override { inner_->Defer(std::move(task)); }
  Counters counters() const override { return inner_->counters(); }
  void Close() override { inner_->Close(); }
  void Join() override { inner_->Join(); }

  void SetPlan(FaultPlan plan) override { faults_->SetPlan(plan); }
  const FaultCounts& faults() const override { return faults_->counts; }

 private:
  const std::shared_ptr<Endpoint> inner_;
  const std::shared_ptr<Faults> faults_;
};

}  // namespace

std::shared_ptr<FaultInjector> FaultInjector::Create(std::shared_ptr<Endpoint> inner, FaultPlan plan) {
  return std::make_shared<FaultInjectorImpl>(std::move(inner), plan);
}

}  // namespace Atoll::transport
