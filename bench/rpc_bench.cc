// Calls between two processes of this host: round trip, calls a second, bytes a second.
//
// The child serves, the parent calls, over a Unix socket and over TCP on loopback; each number is the best of
// several rounds, since another process on the machine only ever makes it worse.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/time/clock.h"
#include "atoll/rpc/agent.h"
#include "atoll/transport/endpoint.h"

namespace Atoll {
namespace {

constexpr absl::Duration kHang = absl::Seconds(60);
constexpr int kRounds = 5;
const rpc::MethodId kEcho = {"bench.echo", 1};

void DieOf(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "rpc_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

std::unique_ptr<rpc::Agent> StartAgent(const std::string& name, bool unix_sockets) {
  transport::EndpointOptions options;
  options.job = "rpc-bench";
  options.self = {name, base::NewIncarnation()};
  options.key.bytes = "not a secret: loopback, one run";
  options.enable_unix = unix_sockets;
  options.enable_cma = unix_sockets;
  auto endpoint = transport::CreateEndpoint(options);
  DieOf(endpoint.status());
  rpc::AgentOptions agent_options;
  agent_options.self = options.self;
  agent_options.endpoint = *endpoint;
  auto agent = rpc::Agent::Start(std::move(agent_options));
  DieOf(agent.status());
  return *std::move(agent);
}

/// The child: answers each call with an empty body, says where it is on `out`, ends when `in` does.
[[noreturn]] void Serve(int in, int out, bool unix_sockets) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::unique_ptr<rpc::Agent> agent = StartAgent("server", unix_sockets);
  base::InlineExecutor inline_executor;
  rpc::MethodOptions options;
  options.executor = &inline_executor;  // Nothing here waits.
  DieOf(agent->Register(
      kEcho, [](rpc::ServerCall call) { std::move(call.responder).Reply(rpc::Payload()); }, options));
  std::string text = std::to_string(agent->self().incarnation.value());
  for (const std::string& address : agent->addresses()) text += "\n" + address;
  text += '\0';
  if (write(out, text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::exit(1);
  char byte;
  while (read(in, &byte, 1) > 0) {
  }
  agent.reset();
  std::_Exit(0);
}

double Seconds(absl::Time since) { return absl::ToDoubleSeconds(absl::Now() - since); }

double RoundTripMicroseconds(rpc::Agent& agent) {
  constexpr int kCalls = 2000;
  absl::Time start = absl::Now();
  for (int i = 0; i < kCalls; ++i) DieOf(agent.Call("server", kEcho, {}).Wait(kHang).status());
  return Seconds(start) / kCalls * 1e6;
}

double CallsPerSecond(rpc::Agent& agent) {
  constexpr int kBatch = 64, kBatches = 300;
  absl::Time start = absl::Now();
  for (int batch = 0; batch < kBatches; ++batch) {
    absl::BlockingCounter left(kBatch);
    for (int i = 0; i < kBatch; ++i) {
      agent.Call("server", kEcho, {}, {}, [&left](absl::StatusOr<rpc::Received> reply) {
        DieOf(reply.status());
        left.DecrementCount();
      });
    }
    left.Wait();
  }
  return kBatch * kBatches / Seconds(start);
}

double GigabytesPerSecond(rpc::Agent& agent, int64_t bytes_each, int count) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < count; ++i) tensors.push_back(at::ones({bytes_each / 4}));
  absl::Time start = absl::Now();
  std::vector<base::Future<rpc::Received>> calls;
  for (const at::Tensor& tensor : tensors) {
    rpc::Payload payload;
    payload.tensors.push_back(rpc::Lend(tensor));
    calls.push_back(agent.Call("server", kEcho, std::move(payload)));
  }
  for (const auto& call : calls) DieOf(call.Wait(kHang).status());
  return static_cast<double>(bytes_each) * count / Seconds(start) / 1e9;
}

template <class F>
std::pair<double, double> LeastAndMost(F measure) {
  measure();  // Connections and memory are there after this.
  std::vector<double> results;
  for (int i = 0; i < kRounds; ++i) results.push_back(measure());
  auto [least, most] = std::minmax_element(results.begin(), results.end());
  return {*least, *most};
}

void Measure(bool unix_sockets) {
  int to_child[2], from_child[2];
  if (pipe(to_child) != 0 || pipe(from_child) != 0) DieOf(absl::InternalError("pipe"));
  pid_t child = fork();  // Before there is any thread.
  if (child == 0) {
    close(to_child[1]);
    close(from_child[0]);
    Serve(to_child[0], from_child[1], unix_sockets);
  }
  close(to_child[0]);
  close(from_child[1]);
  std::string text;
  for (char byte; read(from_child[0], &byte, 1) == 1 && byte != '\0';) text += byte;
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  uint64_t incarnation = 0;
  if (!absl::SimpleAtoi(lines[0], &incarnation)) DieOf(absl::InternalError("the server did not start"));
  {
    std::unique_ptr<rpc::Agent> agent = StartAgent("client", unix_sockets);
    agent->AddPeer({{"server", base::Incarnation(incarnation)},
                    std::vector<std::string>(lines.begin() + 1, lines.end())});
    const char* over = unix_sockets ? "unix, cma" : "tcp";
    std::printf("%-10s empty call       %8.1f us\n", over,
                LeastAndMost([&] { return RoundTripMicroseconds(*agent); }).first);
    std::printf("%-10s 64 in flight     %8.0f calls/s\n", over,
                LeastAndMost([&] { return CallsPerSecond(*agent); }).second);
    std::printf("%-10s push 16 x 4 MiB  %8.2f GB/s\n", over,
                LeastAndMost([&] { return GigabytesPerSecond(*agent, 4 << 20, 16); }).second);
    std::printf("%-10s push 64 MiB      %8.2f GB/s\n", over,
                LeastAndMost([&] { return GigabytesPerSecond(*agent, 64 << 20, 1); }).second);
    std::fflush(stdout);
  }
  close(to_child[1]);
  close(from_child[0]);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace Atoll

int main() {
  for (bool unix_sockets : {true, false}) {
    // A process of its own for each: fork wants no threads behind it.
    pid_t child = fork();
    if (child == 0) {
      Atoll::Measure(unix_sockets);
      return 0;
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return 1;
  }
  return 0;
}
