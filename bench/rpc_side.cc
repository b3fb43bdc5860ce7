// Calls through rpc::Agent between processes of this host.
//   rpc_side serve WAY
//   rpc_side call WAY CASE NAME ADDRESS
// WAY: unix+cma (what an agent uses on one host) or tcp.
#include <ATen/ops/from_blob.h>

#include <deque>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "atoll/bench/side.h"
#include "atoll/rpc/agent.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::bench {
namespace {

constexpr absl::Duration kHang = absl::Seconds(60);
constexpr size_t kBeside = 16;  // Agents of one caller in the case idle.
const rpc::MethodId kEmpty = {"bench.empty"};
const rpc::MethodId kPut = {"bench.put"};    // Tensors into the arena, one behind the other from a place on.
const rpc::MethodId kGet = {"bench.get"};    // A tensor of the arena.
const rpc::MethodId kFill = {"bench.fill"};  // The arena from a seed,
const rpc::MethodId kCheck = {"bench.check"};  // or whether it is so.

std::unique_ptr<rpc::Agent> StartAgent(const std::string& name, absl::string_view way) {
  transport::EndpointOptions options;
  options.job = "bench";
  options.self = {name, base::NewIncarnation()};
  options.key.bytes = "not a secret: loopback, one run";
  options.enable_unix = absl::StartsWith(way, "unix");
  options.enable_cma = absl::StrContains(way, "cma");
  options.enable_cuda = false;
  auto endpoint = transport::CreateEndpoint(options);
  DieOf(endpoint.status());
  rpc::AgentOptions agent_options;
  agent_options.self = options.self;
  agent_options.endpoint = *endpoint;
  auto agent = rpc::Agent::Start(std::move(agent_options));
  DieOf(agent.status());
  return *std::move(agent);
}

at::Tensor InArena(size_t offset, size_t bytes) {
  if (offset > kArenaBytes || bytes > kArenaBytes - offset) Die("beyond the arena");
  return at::from_blob(Arena() + offset, {static_cast<int64_t>(bytes)}, at::kByte);
}

void Register(rpc::Agent& agent, const rpc::MethodId& method, std::function<rpc::Payload(rpc::Received&)> run,
              rpc::MethodOptions options = {}) {
  DieOf(agent.Register(
      method,
      [run](rpc::ServerCall call) {
        rpc::Payload reply = run(call.request);
        std::move(call.responder).Reply(std::move(reply));
      },
      std::move(options)));
}

void Serve(absl::string_view way) {
  std::unique_ptr<rpc::Agent> agent = StartAgent("server", way);
  Register(*agent, kEmpty, [](rpc::Received&) { return rpc::Payload(); });
  rpc::MethodOptions into_arena;
  into_arena.allocate =
      [](const base::MemberId&, absl::string_view body,
         absl::Span<const rpc::TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
    std::vector<at::Tensor> tensors;
    size_t offset = Unpack<Place>(body).offset;
    for (const rpc::TensorMeta& meta : metas) {
      tensors.push_back(InArena(offset, meta.bytes()));
      offset += meta.bytes();
    }
    return tensors;
  };
  Register(
      *agent, kPut, [](rpc::Received&) { return rpc::Payload(); }, into_arena);
  Register(*agent, kGet, [](rpc::Received& request) {
    const Place place = Unpack<Place>(request.body);
    rpc::Payload reply;
    reply.tensors.push_back(rpc::Lend(InArena(place.offset, place.bytes)));
    return reply;
  });
  Register(*agent, kFill, [](rpc::Received& request) {
    Fill(Arena(), kArenaBytes, Unpack<Place>(request.body).seed);
    return rpc::Payload();
  });
  Register(*agent, kCheck, [](rpc::Received& request) {
    const Place place = Unpack<Place>(request.body);
    CheckFilled(Arena(), place.bytes, place.seed);
    return rpc::Payload();
  });
  Arena();
  Announce(absl::StrJoin(agent->addresses(), ","));
}

class Caller {
 public:
  Caller(absl::string_view way, const std::string& name, const std::string& addresses)
      : agent_(StartAgent(name, way)) {
    auto server = agent_->Meet(absl::StrSplit(addresses, ','), kHang).Wait(kHang);
    DieOf(server.status());
    server_ = server->name;
  }
  void Post(const rpc::MethodId& method, rpc::Payload payload, std::vector<at::Tensor> reply_into = {}) {
    rpc::CallOptions options;
    options.reply_into = std::move(reply_into);
    calls_.push_back(agent_->Call(server_, method, std::move(payload), std::move(options)));
  }
  void AwaitAllBut(size_t left) {
    while (calls_.size() > left) {
      DieOf(calls_.front().Wait(kHang).status());
      calls_.pop_front();
    }
  }
  void Call(const rpc::MethodId& method, rpc::Payload payload = {}) {
    DieOf(agent_->Call(server_, method, std::move(payload)).Wait(kHang).status());
  }
  void Ask(const rpc::MethodId& method, const Place& place) { Call(method, {Pack(place), {}}); }

  Work WorkOf(absl::string_view name);

 private:
  Work InFlight(size_t count) {
    return {nullptr,
            [this, count] {
              Post(kEmpty, {});
              AwaitAllBut(count - 1);
            },
            [this] { AwaitAllBut(0); }, nullptr};
  }
  // `send` sends what lies in the first `bytes` of the arena.
  Work Push(size_t bytes, std::function<void()> send) {
    return {[this, bytes](uint64_t seed) { Fill(Arena(), bytes, seed_ = seed); }, std::move(send), nullptr,
            [this, bytes] {
              Ask(kCheck, {0, bytes, seed_});
            }};
  }
  Work PushTensors(const std::vector<size_t>& sizes) {
    std::vector<at::Tensor> tensors;
    size_t all = 0;
    for (size_t bytes : sizes) {
      tensors.push_back(InArena(all, bytes));
      all += bytes;
    }
    return Push(all, [this, tensors] {
      rpc::Payload payload{Pack(Place()), {}};
      for (const at::Tensor& tensor : tensors) payload.tensors.push_back(rpc::Lend(tensor));
      Call(kPut, std::move(payload));
    });
  }

  const std::unique_ptr<rpc::Agent> agent_;
  std::string server_;
  std::deque<base::Future<rpc::Received>> calls_;
  uint64_t seed_ = 0;
};

Work Caller::WorkOf(absl::string_view name) {
  if (name == "empty_call") return {nullptr, [this] { Call(kEmpty); }, nullptr, nullptr};
  if (name == "calls_in_flight") return InFlight(kCallsInFlight);
  if (name == "many_to_one") return InFlight(kCallsInFlightEach);
  if (name == "small_tensor") return PushTensors({kSmallBytes});
  if (name == "many_tensors") return PushTensors(ResNet50Bytes());
  if (name == "push_64mib") {
    return Push(kBulkBytes, [this] {
      for (size_t at = 0; at < kBulkBytes; at += kChunkBytes) {
        rpc::Payload payload{Pack(Place{at, kChunkBytes}), {}};
        payload.tensors.push_back(rpc::Lend(InArena(at, kChunkBytes)));
        Post(kPut, std::move(payload));
      }
      AwaitAllBut(0);
    });
  }
  if (name == "pull_64mib") {
    return {[this](uint64_t seed) {
              Ask(kFill, {0, 0, seed_ = seed});
            },
            [this] {
              for (size_t at = 0; at < kBulkBytes; at += kChunkBytes) {
                Post(kGet, {Pack(Place{at, kChunkBytes}), {}}, {InArena(at, kChunkBytes)});
              }
              AwaitAllBut(0);
            },
            nullptr, [this] { CheckFilled(Arena(), kBulkBytes, seed_); }};
  }
  Die(absl::StrCat("no case ", name));
}

}  // namespace
}  // namespace Atoll::bench

int main(int argc, char** argv) {
  using namespace Atoll::bench;
  Begin();
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "serve") {
    Serve(words[1]);
  } else if (words.size() == 5 && words[0] == "call") {
    Arena();
    std::vector<std::unique_ptr<Caller>> callers;
    const bool idle = words[2] == "idle";
    for (size_t i = 0; i < (idle ? kBeside : 1); ++i) {
      callers.push_back(std::make_unique<Caller>(words[1], absl::StrCat(words[3], "_", i), words[4]));
    }
    // Idle ones have had both their pipes.
    if (idle) {
      for (auto& caller : callers) caller->WorkOf("push_64mib").once();
    }
    Drive(callers[0]->WorkOf(idle ? "empty_call" : words[2]));
  } else {
    Die("usage: rpc_side serve WAY | call WAY CASE NAME ADDRESS");
  }
  std::_Exit(0);  // Without a farewell: the other side ends too.
}
