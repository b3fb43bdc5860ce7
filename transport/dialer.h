// One Endpoint::Connect: tries addresses in order until one answers as expected and TensorPipe's pipe over
// it is established.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "atoll/transport/dial_verdict.h"
#include "atoll/transport/greeter.h"
#include "atoll/transport/link.h"
#include "atoll/transport/resolver.h"
#include "atoll/transport/transport_context.h"

namespace Atoll::transport {

/// All on the loop. Held by what it waits for, and by the endpoint until it is done.
class Dialer : public std::enable_shared_from_this<Dialer> {
 public:
  using Target = Resolver::Target;
  using Open =
      std::function<absl::StatusOr<std::shared_ptr<Pipe>>(const std::string& url, std::shared_ptr<Link>)>;
  using Done = absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<Pipe>>)>;

  Dialer(std::shared_ptr<TransportContext> context, base::MemberId expected, Lane lane, absl::Time deadline,
         Open open, Done done);
  /// Host names (`names`, for the text) are being asked for: Start comes, or the deadline.
  void AwaitNames(const std::string& names);
  void Start(Resolver::Result found);
  void Abort(absl::Status status);
  /// Told when it is done, whatever the outcome, before `done`.
  void OnDone(absl::AnyInvocable<void()> on_done) { on_done_ = std::move(on_done); }

 private:
  void Next();
  void OnGreeted(const Target& target, Greeted greeted);
  void Failed(const Target& target, const absl::Status& status);
  void GiveUp();
  void Finish(absl::StatusOr<std::shared_ptr<Pipe>> result);

  const std::shared_ptr<TransportContext> context_;
  Loop& loop_;
  const base::MemberId expected_;
  const Lane lane_;
  const absl::Time deadline_;
  const Open open_;
  Done done_;
  absl::AnyInvocable<void()> on_done_;
  std::deque<Target> targets_;
  std::vector<DialFailure> failures_;
  std::optional<Reach> farthest_;
  std::optional<Loop::TimerId> names_timer_;
  std::shared_ptr<Greeter> greeter_;
  std::shared_ptr<Pipe> pipe_;  // Being established.
};

}  // namespace Atoll::transport
