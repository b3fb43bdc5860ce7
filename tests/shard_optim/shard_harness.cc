#include "shard_harness.h"

#include <ATen/EmptyTensor.h>

#include <cstring>

#include "gtest/gtest.h"

namespace Atoll::shard_optim {

base::MemberId WorkerMember(int worker, uint64_t life) {
  return {absl::StrCat("worker", worker), base::Incarnation(1000 * life + worker)};
}

ParameterSpec VectorSpec(std::string name, int64_t elements) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.sizes = {elements};
  spec.strides = {1};
  return spec;
}

bool Answer::there() const {
  absl::MutexLock lock(&state->mu);
  return state->result.has_value();
}
void Answer::Wait() const {
  absl::MutexLock lock(&state->mu);
  auto there = [this] { return state->result.has_value(); };
  ASSERT_TRUE(state->mu.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(60))) << "no answer";
}
absl::Status Answer::status() const {
  absl::MutexLock lock(&state->mu);
  return state->result.has_value() ? state->result->status() : absl::UnknownError("no answer yet");
}
std::vector<float> Answer::values() const {
  const float* data = tensor().data_ptr<float>();
  return std::vector<float>(data, data + tensor().numel());
}
void Answer::Release() const {
  for (rpc::OutTensor& out : (*state->result)->tensors) {
    if (out.on_return) out.on_return();
    out.on_return = nullptr;
  }
}

Harness::Harness(std::vector<ParameterSpec> specs, HarnessOptions harness_options)
    : parameters(std::move(specs)), options(harness_options), lives(options.workers, 1) {
  ShardEnvironment environment;
  environment.executor = options.executor != nullptr ? options.executor : &inline_executor;
  environment.timer = options.timer;
  environment.clock = options.clock != nullptr ? options.clock : &fake_clock;
  environment.memory.staging_bytes = options.staging_bytes;
  environment.memory.spare_bytes = options.spare_bytes;
  for (int owner = 0; owner < options.owners; ++owner) {
    absl::StatusOr<std::shared_ptr<Shard>> shard = Shard::Create(Arguments(owner), environment);
    EXPECT_TRUE(shard.ok()) << shard.status();
    shards.push_back(*std::move(shard));
  }
}

ShardArguments Harness::Arguments(int owner) const {
  ShardArguments arguments;
  arguments.model = "model";
  arguments.owner = owner;
  arguments.worker_count = options.workers;
  arguments.layout.owners = options.owners;
  arguments.layout.chunk_bytes = options.chunk_bytes;
  arguments.parameters = parameters;
  arguments.policy = options.policy;
  return arguments;
}

Answer Harness::CallRaw(int owner, int worker, rpc::MethodId method, std::string body,
                        std::vector<at::Tensor> tensors, absl::Time deadline) {
  Answer answer;
  rpc::Received request;
  request.body = std::move(body);
  request.tensors = std::move(tensors);
  shards[owner]->Handle(WorkerMember(worker, lives[worker]), method, std::move(request), deadline,
                        [state = answer.state](absl::StatusOr<rpc::Payload> reply) {
                          absl::MutexLock lock(&state->mu);
                          EXPECT_FALSE(state->result.has_value()) << "answered twice";
                          state->result.emplace(std::move(reply));
                        });
  return answer;
}

Answer Harness::AttachTo(int owner, int worker) {
  Attach attach;
  attach.worker = worker;
  attach.arguments = Arguments(owner);
  return Call(owner, worker, attach);
}

void Harness::Begin(const std::vector<std::vector<float>>& values) {
  std::vector<Answer> answers;
  for (int owner = 0; owner < options.owners; ++owner) {
    for (int worker = 0; worker < options.workers; ++worker) answers.push_back(AttachTo(owner, worker));
  }
  for (Answer& answer : answers) {
    answer.Wait();
    ASSERT_TRUE(answer.status().ok()) << answer.status();
    ASSERT_TRUE(answer.as<Attach::Reply>().joined);
  }
  for (size_t c = 0; c < layout().chunks().size(); ++c) {
    const Chunk& chunk = layout().chunks()[c];
    at::Tensor tensor = at::detail::empty_cpu({chunk.elements()}, at::TensorOptions().dtype(at::kFloat));
    for (const Segment& segment : chunk.segments) {
      std::memcpy(tensor.data_ptr<float>() + chunk.offset(segment),
                  values[segment.parameter].data() + segment.begin, segment.size() * sizeof(float));
    }
    Answer answer = Call(chunk.owner, 0, Load{static_cast<int32_t>(c)}, {tensor});
    answer.Wait();
    ASSERT_TRUE(answer.status().ok()) << answer.status();
  }
}

Answer Harness::Push(int worker, int64_t step, int chunk_index,
                     const std::vector<std::vector<float>>& gradient, std::vector<bool> defined) {
  const Chunk& chunk = layout().chunks()[chunk_index];
  PushGradient push;
  push.step = step;
  push.chunk = chunk_index;
  push.optimizer = optimizer;
  push.defined = std::string((chunk.segments.size() + 7) / 8, '\0');
  bool any = false;
  for (size_t s = 0; s < chunk.segments.size(); ++s) {
    if (!defined.empty() && !defined[chunk.segments[s].parameter]) continue;
    any = true;
    push.defined[s / 8] = static_cast<char>(push.defined[s / 8] | 1 << (s % 8));
  }
  std::vector<at::Tensor> tensors;
  if (any) {
    rpc::TensorMeta meta;
    meta.sizes = {chunk.elements()};
    absl::StatusOr<std::vector<at::Tensor>> landing = shards[chunk.owner]->Allocate(
        WorkerMember(worker, lives[worker]), PushGradient::Method(), push.Encode(), {meta});
    if (!landing.ok()) {
      Answer refused;
      refused.state->result.emplace(landing.status());
      return refused;
    }
    tensors = *std::move(landing);
    for (const Segment& segment : chunk.segments) {
      std::memcpy(tensors[0].data_ptr<float>() + chunk.offset(segment),
                  gradient[segment.parameter].data() + segment.begin, segment.size() * sizeof(float));
    }
  }
  return Call(chunk.owner, worker, push, std::move(tensors));
}

void Harness::Land(int worker, int64_t step) {
  for (int owner = 0; owner < options.owners; ++owner) {
    Answer answer = Call(owner, worker, OpenLanding{step});
    answer.Wait();
    EXPECT_TRUE(answer.status().ok()) << answer.status();
  }
}

std::vector<std::vector<float>> Harness::PullAll(int64_t min_step) {
  std::vector<std::vector<float>> values;
  for (const ParameterSpec& spec : parameters) values.emplace_back(spec.numel());
  for (size_t c = 0; c < layout().chunks().size(); ++c) {
    Answer answer = Call(OwnerOf(c), 0, Pull{static_cast<int32_t>(c), min_step});
    answer.Wait();
    EXPECT_TRUE(answer.status().ok()) << answer.status();
    if (answer.status().ok()) Scatter(c, answer.values(), values);
    answer.Release();
  }
  return values;
}

void Harness::Scatter(int chunk_index, const std::vector<float>& values,
                      std::vector<std::vector<float>>& into) const {
  const Chunk& chunk = layout().chunks()[chunk_index];
  for (const Segment& segment : chunk.segments) {
    std::memcpy(into[segment.parameter].data() + segment.begin, values.data() + chunk.offset(segment),
                segment.size() * sizeof(float));
  }
}

void Harness::Die(int worker) {
  for (auto& shard : shards)
    shard->OnPeerGone(WorkerMember(worker, lives[worker]), absl::UnavailableError("killed"));
}

}  // namespace Atoll::shard_optim
