#include "atoll/transport/dialer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"

namespace Atoll::transport {

Dialer::Dialer(std::shared_ptr<TransportContext> context, base::MemberId expected, Lane lane,
               absl::Time deadline, Open open, Done done)
    : context_(std::move(context)),
      loop_(*context_->engine()->loop),
      expected_(std::move(expected)),
      lane_(lane),
      deadline_(deadline),
      open_(std::move(open)),
      done_(std::move(done)) {}

void Dialer::AwaitNames(const std::string& names) {
  names_timer_ = loop_.At(deadline_, [self = shared_from_this(), names] {
    self->failures_.push_back(
        {std::nullopt, absl::UnavailableError(absl::StrCat("no answer in time about ", names))});
    self->GiveUp();
  });
}

void Dialer::Start(Resolver::Result found) {
  if (!done_) return;
  if (names_timer_.has_value()) loop_.Cancel(*names_timer_);
  names_timer_.reset();
  targets_ = std::move(found.targets);
  for (const Target& target : targets_)
    farthest_ = std::max(farthest_, std::optional(ReachOf(target.address)));
  for (absl::Status& failure : found.failures) {
    // Where its name leads is not known now: the peer may be there.
    if (!absl::IsInvalidArgument(failure)) farthest_ = Reach::kEverywhere;
    failures_.push_back({std::nullopt, std::move(failure)});
  }
  Next();
}

void Dialer::Next() {
  if (!done_) return;
  const absl::Duration left = deadline_ - loop_.Now();
  if (targets_.empty() || left <= absl::ZeroDuration()) return GiveUp();
  // An address that swallows our packets must not use up the time of those behind it.
  const absl::Duration share = left / static_cast<int64_t>(targets_.size());
  Target target = std::move(targets_.front());
  targets_.pop_front();
  greeter_ = context_->NewGreeter();
  greeter_->StartClient(target.address, expected_, Purpose{0, static_cast<uint8_t>(lane_)}, share,
                        [self = shared_from_this(), target](absl::StatusOr<Greeted> greeted) {
                          if (!greeted.ok()) return self->Failed(target, greeted.status());
                          self->OnGreeted(target, *std::move(greeted));
                        });
}

void Dialer::OnGreeted(const Target& target, Greeted greeted) {
  auto link =
      std::make_shared<Link>(PeerInfo{greeted.peer, lane_, target.address.ToString(), /*initiated=*/true});
  absl::StatusOr<std::shared_ptr<Pipe>> pipe = open_(context_->Offer(std::move(greeted), link), link);
  if (!pipe.ok()) return Failed(target, pipe.status());
  pipe_ = *std::move(pipe);
  const Loop::TimerId timer = loop_.At(deadline_, [link] {
    link->Settle(absl::DeadlineExceededError("the pipe was not established in time"));
  });
  link->OnSettled([self = shared_from_this(), target, timer](absl::Status status) {
    // Wherever it was settled: from here on the loop.
    self->loop_.Defer([self, target, timer, status = std::move(status)] {
      self->loop_.Cancel(timer);
      std::shared_ptr<Pipe> pipe = std::exchange(self->pipe_, nullptr);
      if (pipe == nullptr) return;
      if (!status.ok()) return self->Failed(target, status);
      self->Finish(std::move(pipe));
    });
  });
}

void Dialer::Failed(const Target& target, const absl::Status& status) {
  failures_.push_back({ReachOf(target.address), base::Annotate(status, target.text)});
  // Not from within the greeter's call, so that many dead addresses do not pile up on the stack.
  loop_.Defer([self = shared_from_this()] { self->Next(); });
}

void Dialer::GiveUp() {
  if (failures_.empty()) failures_.push_back({std::nullopt, absl::UnavailableError("no address to try")});
  const std::string text =
      absl::StrCat("cannot connect to ", expected_.name.empty() ? "the peer" : expected_.name);
  Finish(base::WithRan(DialVerdict(text, failures_, farthest_, loop_.Now() >= deadline_), base::Ran::kNo));
}

void Dialer::Abort(absl::Status status) {
  pipe_.reset();
  Finish(base::WithRan(std::move(status), base::Ran::kNo));
  if (greeter_ != nullptr) greeter_->Abort(absl::CancelledError("given up"));
}

void Dialer::Finish(absl::StatusOr<std::shared_ptr<Pipe>> result) {
  if (!done_) return;
  if (names_timer_.has_value()) loop_.Cancel(*names_timer_);
  names_timer_.reset();
  Done done = std::exchange(done_, nullptr);
  if (on_done_) std::exchange(on_done_, nullptr)();
  std::move(done)(std::move(result));
}

}  // namespace Atoll::transport
