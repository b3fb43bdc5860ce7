#include "atoll/rpc/membership_messages.h"

#include <cstring>

#include <ATen/ops/empty.h>

#include "atoll/base/bytes.h"
#include "atoll/base/status.h"

namespace Atoll::rpc {
namespace {

using base::ByteReader;
using base::ByteWriter;
using cluster::Member;
using cluster::MemberEvent;

constexpr size_t kMaxText = 64 << 10;
constexpr size_t kMaxWhy = 4096;
constexpr size_t kMaxValue = 1 << 20;
constexpr size_t kMaxBodyOfValues = 1 << 20;

void PutStrings(ByteWriter& out, const std::vector<std::string>& strings) {
  out.Put<uint32_t>(static_cast<uint32_t>(strings.size()));
  for (const std::string& one : strings) out.PutString(one);
}

std::vector<std::string> GetStrings(ByteReader& in, size_t max_bytes) {
  std::vector<std::string> strings;
  uint32_t count = in.GetCount(sizeof(uint32_t));
  for (uint32_t i = 0; i < count && in.ok(); ++i) strings.emplace_back(in.GetString(max_bytes));
  return strings;
}

void PutId(ByteWriter& out, const base::MemberId& id) {
  out.PutString(id.name);
  out.Put<uint64_t>(id.incarnation.value());
}

base::MemberId GetId(ByteReader& in) {
  base::MemberId id;
  id.name = std::string(in.GetString(kMaxText));
  id.incarnation = base::Incarnation(in.Get<uint64_t>());
  return id;
}

void PutMember(ByteWriter& out, const Member& member) {
  PutId(out, member.id);
  out.Put<int32_t>(member.rank.value());
  out.PutString(member.role);
  PutStrings(out, member.addresses);
}

Member GetMember(ByteReader& in) {
  Member member;
  member.id = GetId(in);
  member.rank = base::Rank(in.Get<int32_t>());
  member.role = std::string(in.GetString(kMaxText));
  member.addresses = GetStrings(in, kMaxText);
  return member;
}

void PutDuration(ByteWriter& out, absl::Duration duration) {
  out.Put<int64_t>(absl::ToInt64Nanoseconds(duration));  // Saturates.
}

absl::Duration GetDuration(ByteReader& in) { return absl::Nanoseconds(in.Get<int64_t>()); }

template <class T>
absl::StatusOr<T> Done(ByteReader& in, T value, absl::string_view what) {
  ATOLL_RETURN_IF_ERROR(base::Annotate(in.Finish(), what));
  return value;
}

}  // namespace

std::string Encode(const JoinRequest& request) {
  ByteWriter out;
  out.Put<int32_t>(request.world_size);
  out.Put<int32_t>(request.rank.value());
  out.PutString(request.role);
  PutStrings(out, request.addresses);
  return std::move(out).Take();
}

absl::StatusOr<JoinRequest> DecodeJoinRequest(absl::string_view body) {
  ByteReader in(body);
  JoinRequest request;
  request.world_size = in.Get<int32_t>();
  request.rank = base::Rank(in.Get<int32_t>());
  request.role = std::string(in.GetString(kMaxText));
  request.addresses = GetStrings(in, kMaxText);
  return Done(in, std::move(request), "a request to join");
}

std::string Encode(const JoinReply& reply) {
  ByteWriter out;
  PutDuration(out, reply.lease);
  out.Put<uint64_t>(reply.event);
  out.Put<uint32_t>(static_cast<uint32_t>(reply.members.size()));
  for (const Member& member : reply.members) PutMember(out, member);
  out.Put<uint32_t>(static_cast<uint32_t>(reply.left.size()));
  for (const base::Rank rank : reply.left) out.Put<int32_t>(rank.value());
  return std::move(out).Take();
}

absl::StatusOr<JoinReply> DecodeJoinReply(absl::string_view body) {
  ByteReader in(body);
  JoinReply reply;
  reply.lease = GetDuration(in);
  reply.event = in.Get<uint64_t>();
  uint32_t count = in.GetCount(24);
  for (uint32_t i = 0; i < count && in.ok(); ++i) reply.members.push_back(GetMember(in));
  count = in.GetCount(sizeof(int32_t));
  for (uint32_t i = 0; i < count && in.ok(); ++i) reply.left.emplace_back(in.Get<int32_t>());
  if (reply.lease <= absl::ZeroDuration()) in.Fail("a lease that is not above zero");
  return Done(in, std::move(reply), "the reply to a request to join");
}

std::string Encode(const std::vector<MemberEvent>& events) {
  ByteWriter out;
  out.Put<uint32_t>(static_cast<uint32_t>(events.size()));
  for (const MemberEvent& event : events) {
    out.Put<uint64_t>(event.number);
    out.Put<uint8_t>(static_cast<uint8_t>(event.kind));
    PutMember(out, event.member);
    out.PutString(absl::string_view(event.reason.message()).substr(0, kMaxText));
  }
  return std::move(out).Take();
}

absl::StatusOr<std::vector<MemberEvent>> DecodeEvents(absl::string_view body) {
  ByteReader in(body);
  std::vector<MemberEvent> events;
  uint32_t count = in.GetCount(37);
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    MemberEvent event;
    event.number = in.Get<uint64_t>();
    uint8_t kind = in.Get<uint8_t>();
    if (kind > static_cast<uint8_t>(MemberEvent::Kind::kDead)) in.Fail("an event of an unknown kind");
    event.kind = static_cast<MemberEvent::Kind>(kind);
    event.member = GetMember(in);
    absl::string_view reason = in.GetString(kMaxText);
    const bool in_order = event.kind == MemberEvent::Kind::kLeft && reason.empty();
    if (event.kind != MemberEvent::Kind::kJoined && !in_order) event.reason = absl::UnavailableError(reason);
    events.push_back(std::move(event));
  }
  return Done(in, std::move(events), "events of the membership");
}

std::string Encode(const DeathReport& report) {
  ByteWriter out;
  PutId(out, report.suspect);
  out.Put<uint8_t>(static_cast<uint8_t>(report.evidence));
  out.PutString(absl::string_view(report.what).substr(0, kMaxText));
  return std::move(out).Take();
}

absl::StatusOr<DeathReport> DecodeReport(absl::string_view body) {
  ByteReader in(body);
  DeathReport report;
  report.suspect = GetId(in);
  uint8_t evidence = in.Get<uint8_t>();
  if (evidence > static_cast<uint8_t>(cluster::MembershipCore::Evidence::kUnreachable)) {
    in.Fail("an unknown kind of evidence");
  }
  report.evidence = static_cast<cluster::MembershipCore::Evidence>(evidence);
  report.what = std::string(in.GetString(kMaxText));
  return Done(in, std::move(report), "a report of a death");
}

std::string Encode(const GatherRequest& request) {
  ByteWriter out;
  out.PutString(request.name);
  PutDuration(out, request.limit);
  PutStrings(out, request.participants);
  out.PutString(request.value);
  return std::move(out).Take();
}

absl::StatusOr<GatherRequest> DecodeGatherRequest(absl::string_view body) {
  ByteReader in(body);
  GatherRequest request;
  request.name = std::string(in.GetString(kMaxText));
  request.limit = GetDuration(in);
  request.participants = GetStrings(in, kMaxText);
  request.value = std::string(in.GetString(kMaxValue));
  return Done(in, std::move(request), "a gather");
}

std::string EncodeSeen(uint64_t event) {
  ByteWriter out;
  out.Put<uint64_t>(event);
  return std::move(out).Take();
}

absl::StatusOr<uint64_t> DecodeSeen(absl::string_view body) {
  ByteReader in(body);
  uint64_t event = in.Get<uint64_t>();
  return Done(in, event, "a poll for events");
}

std::string EncodeWhy(absl::string_view why) {
  ByteWriter out;
  out.PutString(why.substr(0, kMaxWhy));
  return std::move(out).Take();
}

absl::StatusOr<std::string> DecodeWhy(absl::string_view body) {
  ByteReader in(body);
  std::string why(in.GetString(kMaxWhy));
  return Done(in, std::move(why), "a farewell");
}

Payload EncodeGathered(const std::vector<std::string>& values) {
  ByteWriter out;
  PutStrings(out, values);
  Payload payload;
  payload.body = std::move(out).Take();
  if (payload.body.size() <= kMaxBodyOfValues) return payload;
  at::Tensor bytes = at::empty({static_cast<int64_t>(payload.body.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), payload.body.data(), payload.body.size());
  payload.body.clear();
  payload.tensors.push_back(Lend(std::move(bytes)));
  return payload;
}

absl::StatusOr<std::vector<std::string>> DecodeGathered(const Received& received) {
  absl::string_view body = received.body;
  if (!received.tensors.empty()) {
    const at::Tensor& bytes = received.tensors.front();
    body = absl::string_view(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
  }
  ByteReader in(body);
  std::vector<std::string> values = GetStrings(in, kMaxValue);
  return Done(in, std::move(values), "gathered values");
}

}  // namespace Atoll::rpc
