// A member in a process of its own, to be killed: serves "park", which never answers, and "echo". Prints its
// incarnation and addresses on one line; ends with its standard input.
#include <unistd.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/rpc/agent.h"

int main() {
  using namespace Atoll;
  transport::EndpointOptions endpoint_options;
  endpoint_options.job = "agent-test";
  endpoint_options.self = {"victim", base::NewIncarnation()};
  endpoint_options.key.bytes = "a key of at least sixteen bytes";
  auto endpoint = transport::CreateEndpoint(endpoint_options);
  if (!endpoint.ok()) return 1;
  rpc::AgentOptions options;
  options.endpoint = *endpoint;
  options.self = endpoint_options.self;
  auto agent = rpc::Agent::Start(options);
  if (!agent.ok()) return 1;
  absl::Mutex mu;
  std::vector<rpc::Responder> parked;
  (*agent)
      ->Register({"park"},
                 [&](rpc::ServerCall call) {
                   absl::MutexLock lock(&mu);
                   parked.push_back(std::move(call.responder));
                 })
      .IgnoreError();
  (*agent)
      ->Register({"parked"},
                 [&](rpc::ServerCall call) {
                   absl::MutexLock lock(&mu);
                   rpc::Payload reply;
                   reply.body = absl::StrCat(parked.size());
                   std::move(call.responder).Reply(std::move(reply));
                 })
      .IgnoreError();
  (*agent)
      ->Register({"echo"},
                 [](rpc::ServerCall call) {
                   rpc::Payload reply;
                   reply.body = call.request.body;
                   for (auto& tensor : call.request.tensors) reply.tensors.push_back(rpc::Copy(tensor));
                   std::move(call.responder).Reply(std::move(reply));
                 })
      .IgnoreError();
  std::printf("%llu %s\n", static_cast<unsigned long long>(options.self.incarnation.value()),
              absl::StrJoin((*agent)->addresses(), " ").c_str());
  std::fflush(stdout);
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  (*agent)->Shutdown(absl::Seconds(5)).IgnoreError();
  parked.clear();
  return 0;
}
