#include "atoll/client/staging.h"

#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace Atoll::client {

Staging::Staging(const shard_optim::Layout& layout)
    : gather_(layout.chunks().size()), landing_(layout.chunks().size()) {
  for (size_t i = 0; i < layout.chunks().size(); ++i) {
    const shard_optim::Chunk& chunk = layout.chunks()[i];
    if (layout.buckets()[chunk.bucket].parameters.size() == 1) continue;
    gather_[i] = at::zeros({chunk.elements()}, at::kFloat);
    landing_[i] = at::empty({chunk.elements()}, at::kFloat);
  }
}

void Staging::Gather(const shard_optim::Layout& layout, int parameter, const at::Tensor& flat) const {
  const shard_optim::Bucket& bucket = layout.buckets()[layout.bucket_of(parameter)];
  const float* from = flat.const_data_ptr<float>();
  for (int i = bucket.first_chunk; i < bucket.first_chunk + bucket.chunk_count; ++i) {
    const shard_optim::Chunk& chunk = layout.chunks()[i];
    float* to = gather_[i].data_ptr<float>();
    for (const shard_optim::Segment& segment : chunk.segments) {
      if (segment.parameter != parameter) continue;
      std::memcpy(to + chunk.offset(segment), from + segment.begin, segment.size() * sizeof(float));
    }
  }
}

void Staging::Scatter(const shard_optim::Layout& layout, int chunk, const ParameterSet& parameters) const {
  const shard_optim::Chunk& arrived = layout.chunks()[chunk];
  const float* from = landing_[chunk].const_data_ptr<float>();
  for (const shard_optim::Segment& segment : arrived.segments) {
    std::memcpy(parameters.Data(segment.parameter) + segment.begin, from + arrived.offset(segment),
                segment.size() * sizeof(float));
  }
}

}  // namespace Atoll::client
