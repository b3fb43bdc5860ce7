// Shards of all owners in one process, and workers that speak to them without a network.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "atoll/base/clock.h"
#include "atoll/base/executor.h"
#include "atoll/base/future.h"
#include "atoll/shard_optim/messages.h"
#include "atoll/shard_optim/shard.h"

namespace Atoll::shard_optim {

base::MemberId WorkerMember(int worker, uint64_t life = 1);
ParameterSpec VectorSpec(std::string name, int64_t elements);

/// What a call brought: filled when it was answered, perhaps later. Holding `payload` holds the loans.
struct Answer {
  struct State {
    absl::Mutex mu;
    std::optional<absl::StatusOr<rpc::Payload>> result;
  };
  std::shared_ptr<State> state = std::make_shared<State>();

  bool there() const;
  /// Waits; fails the test after a hang limit.
  void Wait() const;
  absl::Status status() const;
  template <class Reply>
  Reply as() const {
    return *Reply::Decode((*state->result)->body);
  }
  const at::Tensor& tensor() const { return (*state->result)->tensors.at(0).tensor; }
  std::vector<float> values() const;
  /// Ends the loans, as rpc does when the peer has received.
  void Release() const;
};

struct HarnessOptions {
  int owners = 1;
  int workers = 1;
  Policy policy = Sync{};
  size_t chunk_bytes = 4 << 20;
  size_t staging_bytes = size_t{1} << 30;
  size_t spare_bytes = size_t{256} << 20;
  base::Executor* executor = nullptr;  ///< Null: everything runs inside the call.
  base::Timer* timer = nullptr;
  const base::Clock* clock = nullptr;  ///< Null: `fake_clock`.
};

class Harness {
 public:
  Harness(std::vector<ParameterSpec> parameters, HarnessOptions options);

  const Layout& layout() const { return shards[0]->layout(); }
  ShardArguments Arguments(int owner) const;
  int OwnerOf(int chunk) const { return layout().chunks()[chunk].owner; }

  template <class Request>
  Answer Call(int owner, int worker, const Request& request, std::vector<at::Tensor> tensors = {},
              absl::Time deadline = absl::InfiniteFuture()) {
    return CallRaw(owner, worker, Request::Method(), request.Encode(), std::move(tensors), deadline);
  }
  Answer CallRaw(int owner, int worker, rpc::MethodId method, std::string body,
                 std::vector<at::Tensor> tensors, absl::Time deadline);

  Answer AttachTo(int owner, int worker);
  /// Attaches all workers everywhere and loads `values`, by parameter.
  void Begin(const std::vector<std::vector<float>>& values);
  /// As rpc does it: the tensor lands where Allocate says. `gradient` is by parameter; `defined` by
  /// parameter, all if empty.
  Answer Push(int worker, int64_t step, int chunk, const std::vector<std::vector<float>>& gradient,
              std::vector<bool> defined = {});
  void Land(int worker, int64_t step);
  /// All parameters, pulled.
  std::vector<std::vector<float>> PullAll(int64_t min_step = 0);
  /// Writes a chunk's values where they belong.
  void Scatter(int chunk, const std::vector<float>& values,
               std::vector<std::vector<float>>& parameters) const;
  void Die(int worker);
  void Restart(int worker) { ++lives[worker]; }

  std::vector<ParameterSpec> parameters;
  HarnessOptions options;
  base::FakeClock fake_clock;
  base::InlineExecutor inline_executor;
  AdamOptions optimizer;
  std::vector<uint64_t> lives;
  std::vector<std::shared_ptr<Shard>> shards;
};

using Values = std::vector<std::vector<float>>;  // By parameter.

inline Values Fill(const std::vector<ParameterSpec>& specs, float value) {
  Values values;
  for (const ParameterSpec& spec : specs) values.emplace_back(spec.numel(), value);
  return values;
}

// Two small parameters in one chunk, begun at 1.
struct Small : Harness {
  explicit Small(HarnessOptions options) : Harness({VectorSpec("a", 70), VectorSpec("b", 5)}, options) {
    Begin(Fill(parameters, 1));
  }
  Values Gradient(float value) const { return Fill(parameters, value); }
};

}  // namespace Atoll::shard_optim
