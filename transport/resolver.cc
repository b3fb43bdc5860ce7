#include "atoll/transport/resolver.h"

#include <pthread.h>

#include <cstdint>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/status.h"

namespace Atoll::transport {
namespace {

// A name that hangs must not hold up the others: not for ever, and not by one.
constexpr int kMaxThreads = 4;

Resolver::Result ResolveAll(const std::vector<std::string>& addresses) {
  Resolver::Result result;
  for (const std::string& text : addresses) {
    absl::StatusOr<std::vector<SocketAddress>> resolved = ResolveAddress(text);
    if (!resolved.ok()) {
      result.failures.push_back(base::Annotate(resolved.status(), text));
      continue;
    }
    for (const SocketAddress& address : *resolved) result.targets.push_back({text, address});
  }
  return result;
}

}  // namespace

struct Resolver::State {
  struct Job {
    uint64_t id;
    std::vector<std::string> addresses;
  };
  absl::Mutex mu;
  bool closed ABSL_GUARDED_BY(mu) = false;
  int threads ABSL_GUARDED_BY(mu) = 0;
  uint64_t next_id ABSL_GUARDED_BY(mu) = 1;
  std::deque<Job> queue ABSL_GUARDED_BY(mu);
  std::map<uint64_t, Done> waiting ABSL_GUARDED_BY(mu);  // Of queued jobs and of those under way.
};

Resolver::Resolver() : state_(std::make_shared<State>()) {}

bool Resolver::Literal(const std::vector<std::string>& addresses, Result* result) {
  for (const std::string& text : addresses) {
    absl::StatusOr<SocketAddress> literal = ParseAddress(text);
    if (absl::IsNotFound(literal.status())) return false;
    if (literal.ok()) {
      result->targets.push_back({text, *literal});
    } else {
      result->failures.push_back(base::Annotate(literal.status(), text));
    }
  }
  return true;
}

void Resolver::Resolve(std::vector<std::string> addresses, Done done) {
  bool start;
  uint64_t id;
  {
    absl::MutexLock lock(&state_->mu);
    if (state_->closed) return;
    id = state_->next_id++;
    state_->queue.push_back({id, addresses});
    state_->waiting.emplace(id, std::move(done));
    start = state_->threads < kMaxThreads;
    if (start) ++state_->threads;
  }
  if (!start) return;
  try {
    std::thread([state = state_] { Run(state); }).detach();
  } catch (const std::system_error& error) {
    Done failed;
    {
      absl::MutexLock lock(&state_->mu);
      if (--state_->threads > 0) return;  // Another one comes to it.
      state_->queue.clear();
      auto found = state_->waiting.find(id);
      if (found == state_->waiting.end()) return;
      failed = std::move(found->second);
      state_->waiting.erase(found);
    }
    Result result;
    result.failures.push_back(absl::ResourceExhaustedError("no thread to ask for a host name"));
    std::move(failed)(std::move(result));
  }
}

void Resolver::Run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), "atoll-resolve");
  while (true) {
    State::Job job;
    {
      absl::MutexLock lock(&state->mu);
      if (state->queue.empty()) {
        --state->threads;
        return;
      }
      job = std::move(state->queue.front());
      state->queue.pop_front();
    }
    Result result = ResolveAll(job.addresses);
    Done done;
    {
      absl::MutexLock lock(&state->mu);
      auto found = state->waiting.find(job.id);
      if (found == state->waiting.end()) continue;
      done = std::move(found->second);
      state->waiting.erase(found);
    }
    std::move(done)(std::move(result));
  }
}

void Resolver::Close() {
  std::map<uint64_t, Done> dropped;  // Destroyed without the lock.
  absl::MutexLock lock(&state_->mu);
  state_->closed = true;
  state_->queue.clear();
  dropped.swap(state_->waiting);
}

}  // namespace Atoll::transport
