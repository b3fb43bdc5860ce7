#include <cstdlib>
#include <cstring>

#include <ATen/ops/zeros.h>

#include "atoll/rpc/membership_messages.h"
#include "atoll/rref/wire.h"
#include "atoll/shard_optim/messages.h"
#include "fuzz.h"

namespace Atoll::fuzz {
namespace {

/// `decode` of `body`; `encode` of what it gives is decoded too, and encoded the same once more.
template <class Decode, class Encode>
void Check(absl::string_view body, Decode decode, Encode encode) {
  const auto decoded = decode(body);
  if (!decoded.ok()) return;
  const std::string once = encode(*decoded);
  const auto again = decode(absl::string_view(once));
  if (!again.ok() || encode(*again) != once) std::abort();
}

template <class Message>
void CheckMessage(absl::string_view body) {
  Check(
      body, [](absl::string_view bytes) { return Message::Decode(bytes); },
      [](const Message& message) { return message.Encode(); });
}

const auto kEncode = [](const auto& message) { return rpc::Encode(message); };
const auto kEncodeRref = [](const auto& message) { return rref::Encode(message); };

}  // namespace

void FuzzMembership(Input input) {
  const uint8_t which = input.Byte() % 8;
  const absl::string_view body = input.rest();
  if (which == 0) Check(body, rpc::DecodeJoinRequest, kEncode);
  if (which == 1) Check(body, rpc::DecodeJoinReply, kEncode);
  if (which == 2) Check(body, rpc::DecodeEvents, kEncode);
  if (which == 3) Check(body, rpc::DecodeReport, kEncode);
  if (which == 4) Check(body, rpc::DecodeGatherRequest, kEncode);
  if (which == 5) Check(body, rpc::DecodeSeen, rpc::EncodeSeen);
  if (which == 6) Check(body, rpc::DecodeWhy, [](const std::string& why) { return rpc::EncodeWhy(why); });
  if (which != 7) return;
  // Gathered values, in the body or in a tensor.
  rpc::Received received;
  if (input.Byte() % 2 == 0) {
    received.body = std::string(input.rest());
  } else {
    const absl::string_view bytes = input.rest();
    at::Tensor tensor = at::zeros({static_cast<int64_t>(bytes.size())}, at::kByte);
    if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
    received.tensors.push_back(std::move(tensor));
  }
  const auto values = rpc::DecodeGathered(received);
  if (!values.ok()) return;
  rpc::Payload again = rpc::EncodeGathered(*values);
  rpc::Received back;
  back.body = again.body;
  for (const rpc::OutTensor& out : again.tensors) back.tensors.push_back(out.tensor);
  const auto same = rpc::DecodeGathered(back);
  if (!same.ok() || *same != *values) std::abort();
}

Seeds MembershipSeeds() {
  const cluster::Member someone{
      {"worker1", base::Incarnation(7)}, base::Rank(3), "worker", {"unix:@x", "h:1"}};
  const cluster::MemberEvent joined{cluster::MemberEvent::Kind::kJoined, someone, absl::OkStatus(), 1};
  const cluster::MemberEvent died{cluster::MemberEvent::Kind::kDead, someone,
                                  absl::UnavailableError("its lease"), 2};
  const rpc::DeathReport report{someone.id, cluster::MembershipCore::Evidence::kUnreachable, "no answer"};
  return {Prefixed({0}, rpc::Encode(rpc::JoinRequest{4, base::Rank(3), "owner", {"h:1", "unix:@x"}})),
          Prefixed({1}, rpc::Encode(rpc::JoinReply{absl::Seconds(10), 9, {someone, someone}})),
          Prefixed({2}, rpc::Encode(std::vector<cluster::MemberEvent>{joined, died})),
          Prefixed({3}, rpc::Encode(report)),
          Prefixed({4}, rpc::Encode(
                            rpc::GatherRequest{"start", {"worker1", "owner0"}, "value", absl::Seconds(60)})),
          Prefixed({5}, rpc::EncodeSeen(9)),
          Prefixed({6}, rpc::EncodeWhy("its data ended")),
          Prefixed({7, 0}, rpc::EncodeGathered({"a", "", "longer"}).body),
          Prefixed({7, 1}, rpc::EncodeGathered({"a", "", "longer"}).body)};
}

void FuzzRref(Input input) {
  const uint8_t which = input.Byte() % 5;
  const absl::string_view body = input.rest();
  if (which == 0) {
    Check(
        body,
        [&](absl::string_view bytes) {
          auto request = rref::DecodeCreate(bytes);
          if (request.ok() && request->arguments_at > bytes.size()) std::abort();
          return request;
        },
        [](const rref::CreateRequest& request) { return rref::Encode(request, "arguments"); });
  }
  if (which == 1) Check(body, rref::DecodeFind, kEncodeRref);
  if (which == 2) Check(body, rref::DecodeFork, kEncodeRref);
  if (which == 3) Check(body, rref::DecodeObject, kEncodeRref);
  if (which == 4) {
    Check(
        body,
        [&](absl::string_view bytes) {
          auto prefix = rref::DecodeCall(bytes);
          if (prefix.ok() && prefix->request_at > bytes.size()) std::abort();
          return prefix;
        },
        [](const rref::CallPrefix& prefix) { return rref::Encode(prefix, "request"); });
  }
}

Seeds RrefSeeds() {
  const base::ForkId fork{base::Incarnation(2), 7};
  const base::ObjectId object{base::Incarnation(1), 9};
  return {Prefixed({0},
                   rref::Encode(rref::CreateRequest{fork, "shard_optim.Shard", "shard.net", 0}, "arguments")),
          Prefixed({0}, rref::Encode(rref::CreateRequest{fork, "counter", "", 0}, "")),
          Prefixed({1}, rref::Encode(rref::FindRequest{fork, "shard.net"})),
          Prefixed({2}, rref::Encode(fork)),
          Prefixed({3}, rref::Encode(object)),
          Prefixed({4}, rref::Encode(rref::CallPrefix{object, {"push_gradient", 1}, 0}, "request"))};
}

void FuzzShard(Input input) {
  using namespace shard_optim;  // NOLINT: a dozen messages.
  const uint8_t which = input.Byte() % 13;
  const absl::string_view body = input.rest();
  if (which == 0) CheckMessage<ShardArguments>(body);
  if (which == 1) CheckMessage<Attach>(body);
  if (which == 2) CheckMessage<Attach::Reply>(body);
  if (which == 3) CheckMessage<Load>(body);
  if (which == 4) CheckMessage<Join>(body);
  if (which == 5) CheckMessage<Join::Reply>(body);
  if (which == 6) CheckMessage<Pull>(body);
  if (which == 7) CheckMessage<Pull::Reply>(body);
  if (which == 8) CheckMessage<PushGradient>(body);
  if (which == 9) CheckMessage<PushGradient::Reply>(body);
  if (which == 10) CheckMessage<OpenLanding>(body);
  if (which == 11) CheckMessage<Leave>(body);
  if (which == 12) CheckMessage<Info::Reply>(body);
}

Seeds ShardSeeds() {
  using namespace shard_optim;  // NOLINT: a dozen messages.
  ShardArguments arguments;
  arguments.model = "net";
  arguments.owner = 1;
  arguments.worker_count = 3;
  arguments.layout = {.owners = 2, .chunk_bytes = 8192, .small_parameter_bytes = 77};
  arguments.policy = Sync{absl::Milliseconds(1234)};
  for (int i = 0; i < 2; ++i) {
    ParameterSpec spec;
    spec.name = absl::StrCat("layer.", i);
    spec.sizes = {i + 1, 2};
    spec.strides = {2, 1};
    arguments.parameters.push_back(spec);
  }
  Attach attach;
  attach.worker = 1;
  attach.arguments = arguments;
  arguments.policy = Async{};
  PushGradient push;
  push.defined = AllDefined(9);
  return {Prefixed({0}, arguments.Encode()),
          Prefixed({1}, attach.Encode()),
          Prefixed({2}, Attach::Reply().Encode()),
          Prefixed({3}, Load().Encode()),
          Prefixed({4}, Join().Encode()),
          Prefixed({5}, Join::Reply().Encode()),
          Prefixed({6}, Pull().Encode()),
          Prefixed({7}, Pull::Reply().Encode()),
          Prefixed({8}, push.Encode()),
          Prefixed({9}, PushGradient::Reply().Encode()),
          Prefixed({10}, OpenLanding().Encode()),
          Prefixed({11}, Leave().Encode()),
          Prefixed({12}, Info::Reply().Encode())};
}

}  // namespace Atoll::fuzz
