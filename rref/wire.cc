#include "atoll/rref/wire.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/bytes.h"
#include "atoll/base/status.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rref {
namespace {

using base::ByteReader;
using base::ByteWriter;

template <class Id>
void PutId(ByteWriter& writer, const Id& id) {
  writer.Put<uint64_t>(id.creator.value());
  writer.Put<uint64_t>(id.counter);
}

template <class Id>
Id GetId(ByteReader& reader) {
  Id id;
  id.creator = base::Incarnation(reader.Get<uint64_t>());
  id.counter = reader.Get<uint64_t>();
  return id;
}

absl::Status CheckName(absl::string_view what, absl::string_view name, size_t limit) {
  const bool odd =
      std::any_of(name.begin(), name.end(), [](unsigned char c) { return absl::ascii_iscntrl(c); });
  if (!name.empty() && name.size() <= limit && !odd) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, " is 1 to ", limit,
                                                 " bytes without control characters, not the ", name.size(),
                                                 " of '", absl::CHexEscape(name.substr(0, limit)), "'"));
}

}  // namespace

const rpc::MethodId& CreateMethod() {
  static const rpc::MethodId* const id = new rpc::MethodId{"rref.create", 1};
  return *id;
}
const rpc::MethodId& FindMethod() {
  static const rpc::MethodId* const id = new rpc::MethodId{"rref.find", 1};
  return *id;
}
const rpc::MethodId& ReleaseMethod() {
  static const rpc::MethodId* const id = new rpc::MethodId{"rref.release", 1};
  return *id;
}
const rpc::MethodId& CallMethod() {
  static const rpc::MethodId* const id = new rpc::MethodId{"rref.call", 1};
  return *id;
}

absl::Status CheckClassName(absl::string_view name) {
  return CheckName("a class's name", name, kMaxClassNameBytes);
}

absl::Status CheckPinnedName(absl::string_view name) {
  return CheckName("a pinned name", name, kMaxPinnedNameBytes);
}

std::string Encode(const CreateRequest& request, absl::string_view arguments) {
  ByteWriter writer;
  PutId(writer, request.fork);
  writer.PutString(request.class_name);
  writer.PutString(request.pinned_name);
  writer.PutRaw(arguments);
  return std::move(writer).Take();
}

absl::StatusOr<CreateRequest> DecodeCreate(absl::string_view body) {
  ByteReader reader(body);
  CreateRequest request;
  request.fork = GetId<base::ForkId>(reader);
  request.class_name = std::string(reader.GetString(kMaxClassNameBytes));
  request.pinned_name = std::string(reader.GetString(kMaxPinnedNameBytes));
  request.arguments_at = reader.position();
  ATOLL_RETURN_IF_ERROR(reader.status());
  ATOLL_RETURN_IF_ERROR(CheckClassName(request.class_name));
  if (!request.pinned_name.empty()) ATOLL_RETURN_IF_ERROR(CheckPinnedName(request.pinned_name));
  return request;
}

std::string Encode(const FindRequest& request) {
  ByteWriter writer;
  PutId(writer, request.fork);
  writer.PutString(request.pinned_name);
  return std::move(writer).Take();
}

absl::StatusOr<FindRequest> DecodeFind(absl::string_view body) {
  ByteReader reader(body);
  FindRequest request;
  request.fork = GetId<base::ForkId>(reader);
  request.pinned_name = std::string(reader.GetString(kMaxPinnedNameBytes));
  ATOLL_RETURN_IF_ERROR(reader.Finish());
  ATOLL_RETURN_IF_ERROR(CheckPinnedName(request.pinned_name));
  return request;
}

std::string Encode(const base::ForkId& fork) {
  ByteWriter writer;
  PutId(writer, fork);
  return std::move(writer).Take();
}

absl::StatusOr<base::ForkId> DecodeFork(absl::string_view body) {
  ByteReader reader(body);
  auto fork = GetId<base::ForkId>(reader);
  ATOLL_RETURN_IF_ERROR(reader.Finish());
  return fork;
}

std::string Encode(const base::ObjectId& id) {
  ByteWriter writer;
  PutId(writer, id);
  return std::move(writer).Take();
}

absl::StatusOr<base::ObjectId> DecodeObject(absl::string_view body) {
  ByteReader reader(body);
  auto id = GetId<base::ObjectId>(reader);
  ATOLL_RETURN_IF_ERROR(reader.Finish());
  return id;
}

absl::Status CheckMethod(const rpc::MethodId& method) {
  if (rpc::ValidMethodName(method.name)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a method's name is 1 to ", rpc::kMaxMethodName, " bytes of [a-z0-9_.]"));
}

std::string Encode(const CallPrefix& prefix, absl::string_view request) {
  ByteWriter writer;
  PutId(writer, prefix.object);
  writer.PutString(prefix.method.name);
  writer.Put<uint32_t>(prefix.method.version);
  writer.PutRaw(request);
  return std::move(writer).Take();
}

absl::StatusOr<CallPrefix> DecodeCall(absl::string_view body) {
  ByteReader reader(body);
  CallPrefix prefix;
  prefix.object = GetId<base::ObjectId>(reader);
  prefix.method.name = std::string(reader.GetString(rpc::kMaxMethodName));
  prefix.method.version = reader.Get<uint32_t>();
  prefix.request_at = reader.position();
  ATOLL_RETURN_IF_ERROR(reader.status());
  ATOLL_RETURN_IF_ERROR(CheckMethod(prefix.method));
  return prefix;
}

}  // namespace Atoll::rref
