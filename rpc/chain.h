// What goes on with a value that comes later, as a value that comes later still:
//
//   Chain(Chain(agent->Call("worker2", ...), Decode), AddThree).Then(Answer)
#pragma once

#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/future.h"
#include "atoll/rpc/exception_text.h"

namespace Atoll::rpc {

template <class T>
struct ChainedValue {
  using Type = T;
};
template <class T>
struct ChainedValue<absl::StatusOr<T>> {
  using Type = T;
};

/// What `next` makes of the value of `future`; it takes a T, and returns a U or an absl::StatusOr<U>. It runs once, where
/// callbacks of `future` do (base::Future::Then). An error goes past it, to the end of the chain; what it throws is
/// such an error: Internal, with its type and text.
template <class T, class F>
auto Chain(const base::Future<T>& future, F next) {
  using U = typename ChainedValue<std::invoke_result_t<F, T>>::Type;
  base::Promise<U> promise;
  future.Then([promise, next = std::move(next)](const absl::StatusOr<T>& result) mutable {
    absl::StatusOr<U> made = result.ok() ? absl::UnknownError("") : result.status();
    if (result.ok()) {
      try {
        made = std::move(next)(T(*result));
      } catch (...) {
        made = absl::InternalError(absl::StrCat("what goes on with a value threw ", ExceptionText()));
      }
    }
    promise.Set(std::move(made));
  });
  return promise.future();
}

}  // namespace Atoll::rpc
