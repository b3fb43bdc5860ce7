// Errors. Every fallible function of Atoll returns absl::Status or absl::StatusOr; foreign
// exceptions are caught at the line of the foreign call. A status of a remote call also says whether
// the call ran, because a retry of a call that may have run can apply a gradient twice.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace Atoll::base {

/// Whether a remote call ran on the callee before it failed.
enum class Ran {
  kNo,     ///< It did not run and never will: a retry is safe.
  kMaybe,  ///< Unknown: retry only what is idempotent or numbered.
  kYes,    ///< The handler ran (and may have failed by itself).
};

absl::string_view RanName(Ran ran);

/// Returns `status` with `ran` attached. An OK status is returned unchanged.
absl::Status WithRan(absl::Status status, Ran ran);

/// The attached value, or kMaybe where none is attached.
Ran GetRan(const absl::Status& status);

/// Returns `status` with "`context`: " before its message; code and payloads stay.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

/// "connect: Connection refused": the text of an errno value behind what was attempted.
absl::Status ErrnoStatus(int error_number, absl::string_view what);

}  // namespace Atoll::base

#define ATOLL_CONCAT_INNER(a, b) a##b
#define ATOLL_CONCAT(a, b) ATOLL_CONCAT_INNER(a, b)

/// Returns from the calling function if `expression` (an absl::Status) is an error.
#define ATOLL_RETURN_IF_ERROR(expression)        \
  do {                                           \
    absl::Status atoll_status = (expression);    \
    if (!atoll_status.ok()) return atoll_status; \
  } while (false)

/// Assigns the value of `expression` (an absl::StatusOr) to `target`, or returns its error.
#define ATOLL_ASSIGN_OR_RETURN(target, expression) \
  ATOLL_ASSIGN_OR_RETURN_IMPL(ATOLL_CONCAT(atoll_status_or_, __LINE__), target, expression)
#define ATOLL_ASSIGN_OR_RETURN_IMPL(status_or, target, expression) \
  auto status_or = (expression);                                   \
  if (!status_or.ok()) return status_or.status();                  \
  target = *std::move(status_or)
