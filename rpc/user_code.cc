#include "atoll/rpc/user_code.h"

#include <exception>
#include <string>

#include "absl/strings/str_cat.h"
#include "atoll/base/log.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/hub.h"
#include "atoll/rpc/payload.h"

namespace Atoll::rpc {
namespace {

// A Responder's destructor runs deep inside user code, and is told nothing else of where it is.
thread_local UserCode* t_scope = nullptr;

void ReturnLoansInChild(Payload payload) {
  for (OutTensor& tensor : payload.tensors) {
    if (tensor.lent && tensor.on_return) std::move(tensor.on_return)();
  }
}

}  // namespace

// Responders.

void Responder::State::Answer(absl::StatusOr<Payload> answer) {
  if (fork_mark.in_child()) {
    if (answer.ok()) ReturnLoansInChild(*std::move(answer));
    return base::Abandon(std::exchange(reply, nullptr));  // What it holds is the parent's.
  }
  if (!answered.exchange(true)) return std::exchange(reply, nullptr)(std::move(answer));
  if (hub != nullptr && answer.ok()) ReturnLoans(hub, *std::move(answer));
}

Responder::Responder() = default;
Responder::Responder(Responder&&) noexcept = default;
Responder::Responder(std::shared_ptr<State> state) : state_(std::move(state)) {}

Responder& Responder::operator=(Responder&& other) noexcept {
  if (this != &other) {
    Responder dropped(std::move(*this));
    state_ = std::move(other.state_);
  }
  return *this;
}

Responder::~Responder() {
  if (state_ != nullptr) UserCode::Dropped(std::move(state_));
}

void Responder::Reply(absl::StatusOr<Payload> reply) && {
  std::shared_ptr<State> state = std::move(state_);
  if (state != nullptr) state->Answer(std::move(reply));
}

Responder Responder::From(absl::AnyInvocable<void(absl::StatusOr<Payload>)> reply) {
  return Responder(std::make_shared<State>(std::move(reply)));
}

// Scopes.

UserCode::UserCode() : outer_(t_scope), uncaught_(std::uncaught_exceptions()) { t_scope = this; }

UserCode::UserCode(const Responder& responder, std::shared_ptr<Hub> hub)
    : outer_(t_scope), uncaught_(std::uncaught_exceptions()), own_(responder.state_) {
  if (own_ != nullptr) own_->hub = std::move(hub);
  t_scope = this;
}

UserCode::~UserCode() {
  t_scope = outer_;
  // Dropped by an exception that the user's code caught itself.
  for (const auto& state : dropped_) Dropped(state);
}

void UserCode::Threw(absl::string_view what) {
  const std::string text = ExceptionText();
  ATOLL_LOG(kError) << what << " threw " << text;
  failure_ = absl::InternalError(
      absl::StrCat(own_ != nullptr ? "the handler threw " : "what the handler left to do threw ", text));
  if (own_ != nullptr) own_->Answer(failure_);
  for (const auto& state : std::exchange(dropped_, {})) state->Answer(failure_);
}

void UserCode::Dropped(std::shared_ptr<Responder::State> state) {
  UserCode* scope = t_scope;
  if (scope != nullptr && !scope->failure_.ok()) return state->Answer(scope->failure_);
  if (scope != nullptr && std::uncaught_exceptions() > scope->uncaught_) {
    return scope->dropped_.push_back(std::move(state));
  }
  state->Answer(absl::InternalError("the handler dropped the call"));
}

}  // namespace Atoll::rpc
