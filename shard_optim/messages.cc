#include "atoll/shard_optim/messages.h"

#include "atoll/base/bytes.h"
#include "atoll/base/status.h"

namespace Atoll::shard_optim {
namespace {

using base::ByteReader;
using base::ByteWriter;

constexpr size_t kMaxModelBytes = 256;
constexpr size_t kMaxNameBytes = 4096;
constexpr size_t kMaxDimensions = 64;
constexpr size_t kMaxBitmapBytes = size_t{1} << 17;  // One bit for each of at most 2^20 parameters.
enum class PolicyKind : uint8_t { kSync = 1, kAsync = 2 };

void PutList(ByteWriter& out, const std::vector<int64_t>& values) {
  out.Put<uint32_t>(static_cast<uint32_t>(values.size()));
  for (int64_t value : values) out.Put(value);
}

std::vector<int64_t> GetList(ByteReader& in) {
  uint32_t count = in.GetCount(sizeof(int64_t));
  if (count > kMaxDimensions) in.Fail("more dimensions than 64");
  std::vector<int64_t> values;
  for (uint32_t i = 0; i < count && in.ok(); ++i) values.push_back(in.Get<int64_t>());
  return values;
}

void PutPolicy(ByteWriter& out, const Policy& policy) {
  const Sync* sync = std::get_if<Sync>(&policy);
  out.Put(sync != nullptr ? PolicyKind::kSync : PolicyKind::kAsync);
  out.Put<int64_t>(sync != nullptr ? absl::ToInt64Milliseconds(sync->round_limit) : 0);
}

Policy GetPolicy(ByteReader& in) {
  PolicyKind kind = in.Get<PolicyKind>();
  int64_t limit_ms = in.Get<int64_t>();
  if (!in.ok()) return Async{};
  if (kind == PolicyKind::kAsync) return Async{};
  if (kind != PolicyKind::kSync) in.Fail("an unknown policy");
  if (limit_ms <= 0) in.Fail("a round limit that is not positive");
  return Sync{absl::Milliseconds(limit_ms)};
}

void PutParameter(ByteWriter& out, const ParameterSpec& spec) {
  out.PutString(spec.name);
  out.Put(static_cast<uint8_t>(spec.dtype));
  PutList(out, spec.sizes);
  PutList(out, spec.strides);
}

ParameterSpec GetParameter(ByteReader& in) {
  ParameterSpec spec;
  spec.name = std::string(in.GetString(kMaxNameBytes));
  uint8_t dtype = in.Get<uint8_t>();
  if (dtype >= static_cast<uint8_t>(c10::ScalarType::NumOptions)) in.Fail("an unknown dtype");
  if (in.ok()) spec.dtype = static_cast<c10::ScalarType>(dtype);
  spec.sizes = GetList(in);
  spec.strides = GetList(in);
  return spec;
}

void PutArguments(ByteWriter& out, const ShardArguments& arguments) {
  out.PutString(arguments.model);
  out.Put(arguments.owner);
  out.Put(arguments.worker_count);
  out.Put<int32_t>(arguments.layout.owners);
  out.Put<uint64_t>(arguments.layout.chunk_bytes);
  out.Put<uint64_t>(arguments.layout.small_parameter_bytes);
  PutPolicy(out, arguments.policy);
  out.Put<uint32_t>(static_cast<uint32_t>(arguments.parameters.size()));
  for (const ParameterSpec& spec : arguments.parameters) PutParameter(out, spec);
}

ShardArguments GetArguments(ByteReader& in) {
  ShardArguments arguments;
  arguments.model = std::string(in.GetString(kMaxModelBytes));
  arguments.owner = in.Get<int32_t>();
  arguments.worker_count = in.Get<int32_t>();
  arguments.layout.owners = in.Get<int32_t>();
  arguments.layout.chunk_bytes = in.Get<uint64_t>();
  arguments.layout.small_parameter_bytes = in.Get<uint64_t>();
  arguments.policy = GetPolicy(in);
  constexpr size_t kLeastBytes = 4 + 1 + 4 + 4;  // An empty name, the dtype, two empty lists.
  uint32_t count = in.GetCount(kLeastBytes);
  for (uint32_t i = 0; i < count && in.ok(); ++i) arguments.parameters.push_back(GetParameter(in));
  if (arguments.model.empty()) in.Fail("an empty model name");
  if (arguments.worker_count < 1 || arguments.worker_count > 65536)
    in.Fail("a worker count out of 1 to 65536");
  if (arguments.owner < 0 || arguments.owner >= arguments.layout.owners)
    in.Fail("an owner index out of range");
  return arguments;
}

void PutOptimizer(ByteWriter& out, const AdamOptions& options) {
  out.Put(options.lr);
  out.Put(options.beta1);
  out.Put(options.beta2);
  out.Put(options.eps);
  out.Put(options.weight_decay);
}

AdamOptions GetOptimizer(ByteReader& in) {
  AdamOptions options;
  options.lr = in.Get<double>();
  options.beta1 = in.Get<double>();
  options.beta2 = in.Get<double>();
  options.eps = in.Get<double>();
  options.weight_decay = in.Get<double>();
  return options;
}

// `value` if the reader came to its end without an error; else its error, told as of `what`.
template <class T>
absl::StatusOr<T> Finish(ByteReader& in, T value, absl::string_view what) {
  absl::Status status = in.Finish();
  if (!status.ok()) return base::Annotate(status, what);
  return value;
}

}  // namespace

std::string ShardName(absl::string_view model) { return absl::StrCat("shard/", model); }

std::string AllDefined(size_t segments) {
  std::string bits((segments + 7) / 8, '\xff');
  if (segments % 8 != 0) bits.back() = static_cast<char>((1 << (segments % 8)) - 1);
  return bits;
}

std::string ShardArguments::Encode() const {
  ByteWriter out;
  PutArguments(out, *this);
  return std::move(out).Take();
}
absl::StatusOr<ShardArguments> ShardArguments::Decode(absl::string_view body) {
  ByteReader in(body);
  ShardArguments arguments = GetArguments(in);
  return Finish(in, std::move(arguments), "arguments of a shard");
}

absl::StatusOr<Empty> Empty::Decode(absl::string_view body) {
  ByteReader in(body);
  return Finish(in, Empty{}, "an empty message");
}

std::string Attach::Encode() const {
  ByteWriter out;
  out.Put(worker);
  PutArguments(out, arguments);
  return std::move(out).Take();
}
absl::StatusOr<Attach> Attach::Decode(absl::string_view body) {
  ByteReader in(body);
  Attach attach;
  attach.worker = in.Get<int32_t>();
  if (attach.worker < 0 || attach.worker >= 65536) in.Fail("a worker index out of 0 to 65535");
  attach.arguments = GetArguments(in);
  return Finish(in, std::move(attach), "attach");
}
std::string Attach::Reply::Encode() const {
  ByteWriter out;
  out.Put(next_step);
  out.Put(joined);
  out.Put(load);
  return std::move(out).Take();
}
absl::StatusOr<Attach::Reply> Attach::Reply::Decode(absl::string_view body) {
  ByteReader in(body);
  Reply reply;
  reply.next_step = in.Get<int64_t>();
  reply.joined = in.Get<bool>();
  reply.load = in.Get<bool>();
  return Finish(in, reply, "attach's reply");
}

std::string Load::Encode() const {
  ByteWriter out;
  out.Put(chunk);
  return std::move(out).Take();
}
absl::StatusOr<Load> Load::Decode(absl::string_view body) {
  ByteReader in(body);
  Load load;
  load.chunk = in.Get<int32_t>();
  return Finish(in, load, "load");
}

std::string Join::Encode() const {
  ByteWriter out;
  out.Put(from_step);
  return std::move(out).Take();
}
absl::StatusOr<Join> Join::Decode(absl::string_view body) {
  ByteReader in(body);
  Join join;
  join.from_step = in.Get<int64_t>();
  return Finish(in, join, "join");
}
std::string Join::Reply::Encode() const {
  ByteWriter out;
  out.Put(accepted);
  out.Put(next_step);
  return std::move(out).Take();
}
absl::StatusOr<Join::Reply> Join::Reply::Decode(absl::string_view body) {
  ByteReader in(body);
  Reply reply;
  reply.accepted = in.Get<bool>();
  reply.next_step = in.Get<int64_t>();
  return Finish(in, reply, "join's reply");
}

std::string Pull::Encode() const {
  ByteWriter out;
  out.Put(chunk);
  out.Put(min_step);
  return std::move(out).Take();
}
absl::StatusOr<Pull> Pull::Decode(absl::string_view body) {
  ByteReader in(body);
  Pull pull;
  pull.chunk = in.Get<int32_t>();
  pull.min_step = in.Get<int64_t>();
  return Finish(in, pull, "pull");
}
std::string Pull::Reply::Encode() const {
  ByteWriter out;
  out.Put(step);
  return std::move(out).Take();
}
absl::StatusOr<Pull::Reply> Pull::Reply::Decode(absl::string_view body) {
  ByteReader in(body);
  Reply reply;
  reply.step = in.Get<int64_t>();
  return Finish(in, reply, "pull's reply");
}

std::string PushGradient::Encode() const {
  ByteWriter out;
  out.Put(step);
  out.Put(chunk);
  PutOptimizer(out, optimizer);
  out.PutString(defined);
  return std::move(out).Take();
}
absl::StatusOr<PushGradient> PushGradient::Decode(absl::string_view body) {
  ByteReader in(body);
  PushGradient push;
  push.step = in.Get<int64_t>();
  push.chunk = in.Get<int32_t>();
  push.optimizer = GetOptimizer(in);
  push.defined = std::string(in.GetString(kMaxBitmapBytes));
  return Finish(in, std::move(push), "push_gradient");
}
std::string PushGradient::Reply::Encode() const {
  ByteWriter out;
  out.Put(step);
  out.Put(contributors);
  return std::move(out).Take();
}
absl::StatusOr<PushGradient::Reply> PushGradient::Reply::Decode(absl::string_view body) {
  ByteReader in(body);
  Reply reply;
  reply.step = in.Get<int64_t>();
  reply.contributors = in.Get<int32_t>();
  return Finish(in, reply, "push_gradient's reply");
}

std::string OpenLanding::Encode() const {
  ByteWriter out;
  out.Put(step);
  return std::move(out).Take();
}
absl::StatusOr<OpenLanding> OpenLanding::Decode(absl::string_view body) {
  ByteReader in(body);
  OpenLanding landing;
  landing.step = in.Get<int64_t>();
  return Finish(in, landing, "open_landing");
}

std::string Leave::Encode() const {
  ByteWriter out;
  out.Put(after_step);
  return std::move(out).Take();
}
absl::StatusOr<Leave> Leave::Decode(absl::string_view body) {
  ByteReader in(body);
  Leave leave;
  leave.after_step = in.Get<int64_t>();
  return Finish(in, leave, "leave");
}

absl::StatusOr<Info> Info::Decode(absl::string_view body) {
  ByteReader in(body);
  return Finish(in, Info{}, "info");
}
std::string Info::Reply::Encode() const {
  ByteWriter out;
  out.Put(elements);
  out.Put(state_bytes);
  out.Put(steps);
  out.Put(chunks);
  out.Put(workers);
  out.Put(loaded);
  return std::move(out).Take();
}
absl::StatusOr<Info::Reply> Info::Reply::Decode(absl::string_view body) {
  ByteReader in(body);
  Reply reply;
  reply.elements = in.Get<int64_t>();
  reply.state_bytes = in.Get<uint64_t>();
  reply.steps = in.Get<int64_t>();
  reply.chunks = in.Get<int32_t>();
  reply.workers = in.Get<int32_t>();
  reply.loaded = in.Get<bool>();
  return Finish(in, reply, "info's reply");
}

}  // namespace Atoll::shard_optim
