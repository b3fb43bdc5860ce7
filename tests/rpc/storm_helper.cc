// Members in processes of their own, to be killed and stopped at any moment. This process has loaded everything and
// has one thread; for each line of its input (StormVictim, in its order) it forks one that serves
//   "mark"   answers with its request, whatever that is
//   "pull"   answers with kStormBytes
//   "park"   never answers
// and counts each call of these that runs in the shared memory that the first argument is the descriptor of: body "N"
// in byte N. And
//   "reach"  calls "take" (which answers) of each member in the body (a line each: name, incarnation, addresses) with
//            1 MiB, and answers with the errors, a line each
// It makes its pushes of kStormBytes, and prints one line: its process, its incarnation and its addresses; or 0 and
// what failed. All end with this one.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/from_blob.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/rpc/agent.h"
#include "storm_shared.h"

namespace Atoll::rpc {
namespace {

int Failed(const absl::Status& status) {
  std::printf("%d 0 %s\n", getpid(), status.ToString().c_str());
  std::fflush(stdout);
  return 1;
}

Peer PeerOf(std::istringstream words) {
  Peer peer;
  uint64_t incarnation = 0;
  words >> peer.id.name >> incarnation;
  peer.id.incarnation = base::Incarnation(incarnation);
  for (std::string address; words >> address;) peer.addresses.push_back(address);
  return peer;
}

void Reach(Agent* agent, ServerCall call, const at::Tensor& large) {
  struct Round {
    Responder responder;
    absl::Mutex mu;
    size_t left ABSL_GUARDED_BY(mu) = 1;
    std::string errors ABSL_GUARDED_BY(mu);
    void End(const absl::Status& status) {
      Payload reply;
      {
        absl::MutexLock lock(&mu);
        if (!status.ok()) absl::StrAppend(&errors, status.ToString(), "\n");
        if (--left > 0) return;
        reply.body = errors;
      }
      std::move(responder).Reply(std::move(reply));
    }
  };
  auto round = std::make_shared<Round>();
  round->responder = std::move(call.responder);
  std::istringstream lines(call.request.body);
  for (std::string line; std::getline(lines, line);) {
    const Peer peer = PeerOf(std::istringstream(line));
    {
      absl::MutexLock lock(&round->mu);
      ++round->left;
    }
    agent->AddPeer(peer);
    Payload request;
    request.tensors.push_back(Lend(large.narrow(0, 0, 1 << 20)));
    agent->Call(peer.id.name, {"take"}, std::move(request), {},
                [round](absl::StatusOr<Received> reply) { round->End(reply.status()); });
  }
  round->End(absl::OkStatus());
}

int Serve(const StormVictim& spec, std::atomic<uint8_t>* marks, void* bytes) {
  if (spec.descriptors > 0) {
    const auto count = static_cast<rlim_t>(spec.descriptors);
    const rlimit few{count, count};
    setrlimit(RLIMIT_NOFILE, &few);
  }
  transport::EndpointOptions endpoint_options = StormEndpoint({spec.name, base::NewIncarnation()}, spec.way);
  auto endpoint = transport::CreateEndpoint(endpoint_options);
  if (!endpoint.ok()) return Failed(endpoint.status());
  AgentOptions options;
  options.endpoint = *endpoint;
  options.self = endpoint_options.self;
  options.worker_threads = 2;
  options.reconnect_limit = absl::Seconds(spec.descriptors > 0 && spec.descriptors <= 64 ? 2 : 30);
  auto agent = Agent::Start(options);
  if (!agent.ok()) return Failed(agent.status());
  const at::Tensor large = at::from_blob(bytes, {kStormBytes}, at::kByte);
  absl::Mutex mu;
  std::vector<Responder> parked;
  auto serve = [&](const char* method, std::function<void(ServerCall&)> answer) {
    (*agent)
        ->Register({method},
                   [marks, answer = std::move(answer)](ServerCall call) {
                     marks[std::stoi(call.request.body)].fetch_add(1);
                     answer(call);
                   })
        .IgnoreError();
  };
  serve("mark", [](ServerCall& call) {
    Payload reply;
    reply.body = call.request.body;
    std::move(call.responder).Reply(std::move(reply));
  });
  serve("pull", [&](ServerCall& call) {
    Payload reply;
    reply.tensors.push_back(Lend(large));
    std::move(call.responder).Reply(std::move(reply));
  });
  serve("park", [&](ServerCall& call) {
    absl::MutexLock lock(&mu);
    parked.push_back(std::move(call.responder));
  });
  auto plain = [&](const char* method, Handler handler) {
    (*agent)->Register({method}, std::move(handler)).IgnoreError();
  };
  plain("take", [](ServerCall call) { std::move(call.responder).Reply(Payload()); });
  plain("reach", [&](ServerCall call) { Reach(agent->get(), std::move(call), large); });
  std::printf("%d %llu %s\n", getpid(), static_cast<unsigned long long>(options.self.incarnation.value()),
              absl::StrJoin((*agent)->addresses(), " ").c_str());
  std::fflush(stdout);
  if (!spec.peer.id.name.empty()) (*agent)->AddPeer(spec.peer);
  for (int i = 0; i < spec.pushes; ++i) {
    Payload request;
    request.body = absl::StrCat(i);
    request.tensors.push_back(Lend(large));
    (*agent)->Call(spec.peer.id.name, {"push"}, std::move(request), {}, [](absl::StatusOr<Received>) {});
  }
  while (true) pause();
}

int Main(int marks_fd) {
  // The end of the one that started it is read from the input; that of this one ends those that it started.
  signal(SIGCHLD, SIG_IGN);
  auto* marks = static_cast<std::atomic<uint8_t>*>(
      mmap(nullptr, kStormCalls, PROT_READ | PROT_WRITE, MAP_SHARED, marks_fd, 0));
  void* bytes = mmap(nullptr, kStormBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (marks == MAP_FAILED || bytes == MAP_FAILED) return 1;
  std::memset(bytes, kStormByte, kStormBytes);
  for (std::string line; std::getline(std::cin, line);) {
    StormVictim spec;
    std::istringstream words(line);
    words >> spec.way >> spec.name >> spec.descriptors >> spec.pushes;
    spec.peer = PeerOf(std::move(words));
    const pid_t parent = getpid();
    const pid_t child = fork();
    if (child < 0) return 1;
    if (child > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    _exit(Serve(spec, marks, bytes));
  }
  return 0;
}

}  // namespace
}  // namespace Atoll::rpc

int main(int argc, char** argv) { return argc == 2 ? Atoll::rpc::Main(std::stoi(argv[1])) : 2; }
