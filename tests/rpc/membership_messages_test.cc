#include "atoll/rpc/membership_messages.h"

#include <gtest/gtest.h>

#include <random>

namespace Atoll::rpc {
namespace {

cluster::Member Someone() {
  return {{"worker1", base::Incarnation(0xabcd)}, base::Rank(3), "worker", {"unix:@x", "127.0.0.1:1"}};
}

template <class Decode>
void ExpectOnlyTheWhole(const std::string& body, Decode decode) {
  EXPECT_TRUE(decode(body).ok()) << decode(body).status();
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(decode(absl::string_view(body).substr(0, size)).ok()) << size << " of " << body.size();
  }
  EXPECT_FALSE(decode(body + "x").ok());
  // Whatever a peer sends is decoded or refused.
  std::mt19937 random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string bad = body;
    for (int flips = 0; flips < 3; ++flips) bad[random() % bad.size()] = static_cast<char>(random());
    decode(bad).status().IgnoreError();
  }
}

TEST(MembershipMessages, RoundTrips) {
  auto join = DecodeJoinRequest(Encode(JoinRequest{4, base::Rank(3), "owner", {"a", "b"}}));
  ASSERT_TRUE(join.ok());
  EXPECT_EQ(join->world_size, 4);
  EXPECT_EQ(join->rank, base::Rank(3));
  EXPECT_EQ(join->role, "owner");
  EXPECT_EQ(join->addresses, (std::vector<std::string>{"a", "b"}));

  auto reply = DecodeJoinReply(
      Encode(JoinReply{absl::Milliseconds(1500), 9, {Someone(), Someone()}, {base::Rank(2), base::Rank(5)}}));
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->lease, absl::Milliseconds(1500));
  EXPECT_EQ(reply->event, 9u);
  EXPECT_EQ(reply->left, (std::vector<base::Rank>{base::Rank(2), base::Rank(5)}));
  ASSERT_EQ(reply->members.size(), 2u);
  EXPECT_EQ(reply->members[1].id, Someone().id);
  EXPECT_EQ(reply->members[1].addresses, Someone().addresses);

  std::vector<cluster::MemberEvent> sent(3);
  sent[0] = {cluster::MemberEvent::Kind::kDead, Someone(), absl::UnavailableError("seen"), 7};
  sent[1] = {cluster::MemberEvent::Kind::kLeft, Someone(), absl::OkStatus(), 8};
  sent[2] = {cluster::MemberEvent::Kind::kLeft, Someone(), absl::UnavailableError("failed"), 9};
  auto events = DecodeEvents(Encode(sent));
  ASSERT_TRUE(events.ok());
  EXPECT_EQ((*events)[0].reason, absl::UnavailableError("seen"));
  EXPECT_EQ((*events)[0].number, 7u);
  EXPECT_TRUE((*events)[1].reason.ok());
  EXPECT_EQ((*events)[1].kind, cluster::MemberEvent::Kind::kLeft);
  EXPECT_EQ((*events)[2].reason, absl::UnavailableError("failed"));

  auto report =
      DecodeReport(Encode(DeathReport{Someone().id, cluster::MembershipCore::Evidence::kSeen, "refused"}));
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->suspect, Someone().id);
  EXPECT_EQ(report->evidence, cluster::MembershipCore::Evidence::kSeen);

  auto gather = DecodeGatherRequest(Encode(GatherRequest{"g", {"a"}, "v", absl::InfiniteDuration()}));
  ASSERT_TRUE(gather.ok());
  EXPECT_EQ(gather->value, "v");
  EXPECT_GT(gather->limit, absl::Hours(24 * 365));
  EXPECT_EQ(*DecodeSeen(EncodeSeen(11)), 11u);
  EXPECT_EQ(*DecodeWhy(EncodeWhy("")), "");
  EXPECT_EQ(*DecodeWhy(EncodeWhy("no data")), "no data");
  EXPECT_EQ(DecodeWhy(EncodeWhy(std::string(10000, 'x')))->size(), 4096u);
}

TEST(MembershipMessages, ValuesSmallAndLarge) {
  for (size_t bytes : {size_t{3}, size_t{1} << 20}) {
    std::vector<std::string> values = {std::string(bytes, 'a'), "", std::string(bytes, 'b')};
    Payload payload = EncodeGathered(values);
    EXPECT_EQ(payload.tensors.size(), bytes > 100 ? 1u : 0u);
    Received received;
    received.body = payload.body;
    for (OutTensor& tensor : payload.tensors) received.tensors.push_back(tensor.tensor);
    auto decoded = DecodeGathered(received);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, values);
  }
}

TEST(MembershipMessages, BytesThatAreNoMessageAreRefused) {
  ExpectOnlyTheWhole(Encode(JoinRequest{4, base::Rank(3), "owner", {"a", "b"}}), DecodeJoinRequest);
  ExpectOnlyTheWhole(Encode(JoinReply{absl::Seconds(1), 9, {Someone(), Someone()}, {base::Rank(2)}}),
                     DecodeJoinReply);
  std::vector<cluster::MemberEvent> events(2);
  events[0] = {cluster::MemberEvent::Kind::kDead, Someone(), absl::UnavailableError("seen"), 7};
  events[1] = events[0];
  ExpectOnlyTheWhole(Encode(events), DecodeEvents);
  ExpectOnlyTheWhole(Encode(DeathReport{Someone().id, cluster::MembershipCore::Evidence::kSeen, "refused"}),
                     DecodeReport);
  ExpectOnlyTheWhole(Encode(GatherRequest{"g", {"a", "b"}, "v", absl::Seconds(3)}), DecodeGatherRequest);
  ExpectOnlyTheWhole(EncodeSeen(11), DecodeSeen);
}

}  // namespace
}  // namespace Atoll::rpc
