// What one pipe carries between two processes of this host, by each way: round trips of a header, and
// messages of one tensor into reused memory. Two processes, as in earnest: within one, cma copies nothing
// across address spaces.
//   transport_bench [--bytes=67108864] [--seconds=2]
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/future.h"
#include "atoll/transport/endpoint.h"
#include "atoll/transport/pipe.h"

namespace Atoll::transport {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(60);
constexpr int kServerPort = 0;

struct Way {
  const char* name;
  bool unix_socket;
  bool cma;
  bool tls = false;
};

EndpointOptions OptionsOf(const std::string& name, const Way& way) {
  EndpointOptions options;
  options.job = "bench";
  options.self = {name, base::NewIncarnation()};
  options.key.bytes = "a key for a benchmark alone";
  options.port = kServerPort;
  options.enable_unix = way.unix_socket;
  options.enable_cma = way.cma;
  options.enable_cuda = false;
  // The cost of bytes is that of certificates too: the suite is the same.
  if (way.tls) options.tls.mode = base::TlsMode::kPsk;
  return options;
}

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "transport_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

/// Reads messages into one buffer and answers each with its header, all on the loop.
class Echo : public std::enable_shared_from_this<Echo> {
 public:
  explicit Echo(std::shared_ptr<Pipe> pipe) : pipe_(std::move(pipe)) {}
  void Next() {
    pipe_->ReadDescriptor([self = shared_from_this()](absl::StatusOr<Descriptor> descriptor) {
      if (!descriptor.ok()) return self->done_.Set(base::Unit{}), void();
      if (descriptor->tensors.empty()) return self->Answer(std::move(descriptor->header));
      if (self->memory_.size() < descriptor->tensors[0].bytes)
        self->memory_.resize(descriptor->tensors[0].bytes);
      self->pipe_->Read({{self->memory_.data(), descriptor->tensors[0].bytes, {}, nullptr}},
                        [self, header = std::move(descriptor->header)](absl::Status status) mutable {
                          if (status.ok()) self->Answer(std::move(header));
                        });
    });
  }
  base::Future<base::Unit> done() const { return done_.future(); }

 private:
  void Answer(std::string header) {
    pipe_->Write({std::move(header), {}, {}}, [](absl::Status) {});
    Next();
  }
  const std::shared_ptr<Pipe> pipe_;
  std::vector<char> memory_;
  base::Promise<base::Unit> done_;
};

/// The child: serves until its pipe ends.
[[noreturn]] void Serve(const Way& way, int to_parent) {
  auto endpoint = CreateEndpoint(OptionsOf("server", way));
  Check(endpoint.status());
  base::Promise<std::shared_ptr<Pipe>> promise;
  (*endpoint)->OnPipe([promise](std::shared_ptr<Pipe> pipe) { promise.Set(std::move(pipe)); });
  const std::string address = (*endpoint)->addresses()[0] + "\n";
  if (write(to_parent, address.data(), address.size()) < 0) _exit(1);
  auto pipe = promise.future().Wait(kLimit);
  Check(pipe.status());
  auto echo = std::make_shared<Echo>(*pipe);
  echo->Next();
  (void)echo->done().Wait(absl::Minutes(10));
  _exit(0);
}

/// Calls, one after another or `depth` in flight, for `seconds`; returns calls a second.
double Calls(Pipe& pipe, std::vector<char>& memory, size_t bytes, int depth, double seconds) {
  struct State {
    absl::Mutex mu;
    int in_flight = 0;
  } state;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  uint64_t calls = 0;
  auto send = [&] {
    Message message;
    message.header = "header of a call";
    if (bytes > 0) message.tensors.push_back({memory.data(), bytes, {}, nullptr});
    pipe.Write(std::move(message), [](absl::Status status) { Check(status); });
  };
  auto await = [&] {
    base::Promise<base::Unit> promise;
    pipe.ReadDescriptor([promise](absl::StatusOr<Descriptor> descriptor) {
      Check(descriptor.status());
      promise.Set(base::Unit{});
    });
    Check(promise.future().Wait(kLimit).status());
    ++calls;
  };
  for (int i = 0; i < depth; ++i) send();
  while (elapsed() < seconds) {
    await();
    send();
  }
  for (int i = 0; i < depth; ++i) await();
  return calls / elapsed();
}

void Run(const Way& way, size_t bytes, double seconds) {
  int fds[2];
  if (pipe(fds) != 0) std::exit(1);
  const pid_t child = fork();  // Before the first thread.
  if (child == 0) {
    close(fds[0]);
    Serve(way, fds[1]);
  }
  close(fds[1]);
  std::string address;
  for (char c; read(fds[0], &c, 1) == 1 && c != '\n';) address += c;
  close(fds[0]);
  const pid_t measure = fork();
  if (measure == 0) {
    auto endpoint = CreateEndpoint(OptionsOf("client", way));
    Check(endpoint.status());
    base::Promise<std::shared_ptr<Pipe>> promise;
    (*endpoint)->Connect(
        {address}, {}, Lane::kBulk, kLimit,
        [promise](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { promise.Set(std::move(pipe)); });
    auto pipe = promise.future().Wait(kLimit);
    Check(pipe.status());
    std::vector<char> memory(bytes, 1);
    const double alone = Calls(**pipe, memory, 0, 1, seconds);
    const double many = Calls(**pipe, memory, 0, 16, seconds);
    std::printf("%-10s %8.1f us a round trip, %9.0f calls/s at depth 16", way.name, 1e6 / alone, many);
    for (size_t size : {size_t{64} << 10, size_t{4} << 20, bytes}) {
      const double rate = Calls(**pipe, memory, size, 2, seconds);
      std::printf(", %zu KiB %.2f GB/s", size >> 10, rate * size / 1e9);
    }
    std::printf("\n");
    std::fflush(stdout);
    _exit(0);
  }
  waitpid(measure, nullptr, 0);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace Atoll::transport

int main(int argc, char** argv) {
  size_t bytes = 64 << 20;
  double seconds = 2;
  for (int i = 1; i < argc; ++i) {
    const absl::string_view flag = argv[i];
    if (flag.substr(0, 8) == "--bytes=" && absl::SimpleAtoi(flag.substr(8), &bytes) && bytes > 0) continue;
    if (flag.substr(0, 10) == "--seconds=" && absl::SimpleAtod(flag.substr(10), &seconds)) continue;
    std::fprintf(stderr, "usage: transport_bench [--bytes=N] [--seconds=S]\n");
    return 2;
  }
  for (const Atoll::transport::Way& way : {Atoll::transport::Way{"tcp", false, false},
                                           {"tcp+tls", false, false, true},
                                           {"tcp+cma", false, true},
                                           {"unix", true, false},
                                           {"unix+cma", true, true}}) {
    Atoll::transport::Run(way, bytes, seconds);
  }
}
