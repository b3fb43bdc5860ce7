// What "membership.*" calls carry. Little-endian, bounded: decoders return an error for whatever a peer may
// send. Internal to rpc.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "atoll/cluster/gather_core.h"
#include "atoll/cluster/member.h"
#include "atoll/cluster/membership_core.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

// The caller's id is what the transport proved, and stands in no message.
inline const char kJoinMethod[] = "membership.join";            ///< JoinRequest -> JoinReply
inline const char kHeartbeatMethod[] = "membership.heartbeat";  ///< nothing -> nothing
inline const char kEventMethod[] = "membership.event";          ///< the last event seen -> events
inline const char kReportMethod[] = "membership.report";        ///< DeathReport -> nothing
inline const char kGatherMethod[] = "membership.gather";        ///< GatherRequest -> values
inline const char kLeaveMethod[] = "membership.leave";          ///< why -> nothing
inline const char kPingMethod[] = "membership.ping";            ///< nothing -> nothing, of any member
inline const char kMemberMethod[] = "membership.member";        ///< the same, of those that were let in

struct JoinRequest {
  int world_size = 0;
  base::Rank rank;
  std::string role;
  std::vector<std::string> addresses;
};
struct JoinReply {
  absl::Duration lease;
  uint64_t event = 0;
  std::vector<cluster::Member> members;
  std::vector<base::Rank> left;  ///< Of a fixed world: whose members were there, and left in order.
};
struct DeathReport {
  base::MemberId suspect;
  cluster::MembershipCore::Evidence evidence = cluster::MembershipCore::Evidence::kUnreachable;
  std::string what;
};
struct GatherRequest {
  std::string name;
  std::vector<std::string> participants;
  std::string value;
  absl::Duration limit;
};

std::string Encode(const JoinRequest& request);
std::string Encode(const JoinReply& reply);
std::string Encode(const std::vector<cluster::MemberEvent>& events);
std::string Encode(const DeathReport& report);
std::string Encode(const GatherRequest& request);
std::string EncodeSeen(uint64_t event);
/// Why it leaves: empty if in order, else what failed.
std::string EncodeWhy(absl::string_view why);
/// Values may be too many for a body: they then travel as a tensor.
Payload EncodeGathered(const std::vector<std::string>& values);

absl::StatusOr<JoinRequest> DecodeJoinRequest(absl::string_view body);
absl::StatusOr<JoinReply> DecodeJoinReply(absl::string_view body);
absl::StatusOr<std::vector<cluster::MemberEvent>> DecodeEvents(absl::string_view body);
absl::StatusOr<DeathReport> DecodeReport(absl::string_view body);
absl::StatusOr<GatherRequest> DecodeGatherRequest(absl::string_view body);
absl::StatusOr<uint64_t> DecodeSeen(absl::string_view body);
absl::StatusOr<std::string> DecodeWhy(absl::string_view body);
absl::StatusOr<std::vector<std::string>> DecodeGathered(const Received& received);

}  // namespace Atoll::rpc
