// The one place that includes TensorPipe. Its public headers come with the wheel; those for who implements
// a transport (connection.h, listener.h, nop) are Debian's, of the same TensorPipe. The wheel's must win
// where both have one, because its library is what is linked: the checks below fail the build otherwise.
#pragma once

#include <tensorpipe/channel/mpt/nop_types.h>
#include <tensorpipe/common/nop.h>
#include <tensorpipe/core/nop_types.h>
#include <tensorpipe/tensorpipe.h>
#include <tensorpipe/transport/connection.h>
#include <tensorpipe/transport/listener.h>

#include <optional>
#include <type_traits>

#include "absl/status/status.h"

namespace Atoll::transport {

static_assert(std::is_same_v<tensorpipe::optional<int>, std::optional<int>>,
              "Debian's tensorpipe/common/optional.h is found before the wheel's: put torch/include first");
static_assert(!std::has_virtual_destructor_v<tensorpipe::Error> || std::is_final_v<tensorpipe::Error>,
              "Debian's tensorpipe/common/error.h is found before the wheel's: put torch/include first");

/// Carries a Status of ours through TensorPipe.
class StatusError final : public tensorpipe::BaseError {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)) {}
  std::string what() const override { return std::string(status_.message()); }
  const absl::Status& status() const { return status_; }

 private:
  const absl::Status status_;
};

inline tensorpipe::Error ToError(absl::Status status) {
  if (status.ok()) return tensorpipe::Error();
  return tensorpipe::Error(std::make_shared<StatusError>(std::move(status)), "atoll", 0);
}

/// The Status that was carried, or Unavailable with TensorPipe's own text.
inline absl::Status FromError(const tensorpipe::Error& error) {
  if (!error) return absl::OkStatus();
  if (auto ours = error.castToType<StatusError>()) return ours->status();
  return absl::UnavailableError(error.what());
}

}  // namespace Atoll::transport
