// The requests of an ObjectSpace, as bytes (docs/wire.md). Decoders never abort and never read beyond their
// bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/base/ids.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rref {

inline constexpr size_t kMaxClassNameBytes = 128;
inline constexpr size_t kMaxPinnedNameBytes = 512;

const rpc::MethodId& CreateMethod();   ///< "rref.create": CreateRequest and the arguments; an object id.
const rpc::MethodId& FindMethod();     ///< "rref.find": FindRequest; an object id.
const rpc::MethodId& ReleaseMethod();  ///< "rref.release": a fork id; nothing.
const rpc::MethodId& CallMethod();     ///< "rref.call": CallPrefix and the method's own request; its reply.

/// InvalidArgument unless they are 1 to their limit of bytes without control characters (a pinned name may be
/// empty where none is meant): names reach logs and error texts.
absl::Status CheckClassName(absl::string_view name);
absl::Status CheckPinnedName(absl::string_view name);

struct CreateRequest {
  base::ForkId fork;
  std::string class_name;
  std::string pinned_name;
  size_t arguments_at = 0;  ///< Where the factory's own body begins (set by the decoder).
};
std::string Encode(const CreateRequest& request, absl::string_view arguments);
absl::StatusOr<CreateRequest> DecodeCreate(absl::string_view body);

struct FindRequest {
  base::ForkId fork;
  std::string pinned_name;
};
std::string Encode(const FindRequest& request);
absl::StatusOr<FindRequest> DecodeFind(absl::string_view body);

std::string Encode(const base::ForkId& fork);
absl::StatusOr<base::ForkId> DecodeFork(absl::string_view body);

std::string Encode(const base::ObjectId& id);
absl::StatusOr<base::ObjectId> DecodeObject(absl::string_view body);

struct CallPrefix {
  base::ObjectId object;
  rpc::MethodId method;
  size_t request_at = 0;  ///< Where the method's own body begins (set by the decoder).
};
/// InvalidArgument unless its name is one (rpc::MethodId): names reach logs and error texts.
absl::Status CheckMethod(const rpc::MethodId& method);
std::string Encode(const CallPrefix& prefix, absl::string_view request);
absl::StatusOr<CallPrefix> DecodeCall(absl::string_view body);

}  // namespace Atoll::rref
