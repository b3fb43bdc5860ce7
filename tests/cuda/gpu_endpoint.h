// An endpoint whose pipes carry buffers on FakeGpu's devices: their bytes travel as those of the CPU, their
// devices and what comes before them in front of the header. Its copies keep the order that TensorPipe's
// channels keep: out after what the sender's stream holds, in after both that and what the receiver's stream
// holds.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "atoll/base/bytes.h"
#include "atoll/base/status.h"
#include "atoll/tests/cuda/fake_gpu.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::cuda_test {

class GpuPipe final : public transport::Pipe, public std::enable_shared_from_this<GpuPipe> {
 public:
  /// `gpus` of FakeGpu are the peer's.
  GpuPipe(std::shared_ptr<transport::Pipe> inner, int gpus) : inner_(std::move(inner)), gpus_(gpus) {}

  void Write(transport::Message message, absl::AnyInvocable<void(absl::Status)> done) override {
    base::ByteWriter out;
    out.Put(static_cast<uint32_t>(message.tensors.size()));
    for (size_t i = 0; i < message.tensors.size(); ++i) {
      transport::Buffer& buffer = message.tensors[i];
      const transport::Device target = message.targets.empty() ? transport::Device() : message.targets[i];
      if (!Reaches(buffer.device, target)) {
        return std::move(done)(absl::FailedPreconditionError("no channel leads there"));
      }
      Before before;
      if (buffer.device.kind == transport::Device::Kind::kCuda) {
        FakeGpu::Get().LaunchOn(buffer.cuda_stream);
        before = FakeGpu::Get().OnHandle(buffer.cuda_stream);
      }
      Put(out, buffer.device);
      Put(out, target);
      out.Put(static_cast<uint32_t>(before.size()));
      for (Work work : before) out.Put(work);
      buffer.device = {};
      buffer.cuda_stream = nullptr;
    }
    out.PutRaw(message.header);
    message.header = std::move(out).Take();
    message.targets.clear();
    inner_->Write(std::move(message), std::move(done));
  }

  void ReadDescriptor(absl::AnyInvocable<void(absl::StatusOr<transport::Descriptor>)> done) override {
    inner_->ReadDescriptor([self = shared_from_this(), done = std::move(done)](
                               absl::StatusOr<transport::Descriptor> descriptor) mutable {
      if (descriptor.ok()) self->Unpack(*descriptor);
      std::move(done)(std::move(descriptor));
    });
  }

  void Read(std::vector<transport::Buffer> into, absl::AnyInvocable<void(absl::Status)> done) override {
    std::vector<void*> streams;
    for (transport::Buffer& buffer : into) {
      streams.push_back(buffer.device.kind == transport::Device::Kind::kCuda ? buffer.cuda_stream : nullptr);
      buffer.device = {};
      buffer.cuda_stream = nullptr;
    }
    inner_->Read(std::move(into), [self = shared_from_this(), streams = std::move(streams),
                                   done = std::move(done)](absl::Status status) mutable {
      for (size_t i = 0; status.ok() && i < streams.size(); ++i) {
        if (streams[i] == nullptr) continue;
        FakeGpu::Get().Join(streams[i], self->before_[i]);
        FakeGpu::Get().LaunchOn(streams[i]);
      }
      std::move(done)(std::move(status));
    });
  }

  void Close(absl::Status reason) override { inner_->Close(std::move(reason)); }
  const transport::PeerInfo& peer() const override { return inner_->peer(); }
  bool Reaches(transport::Device, transport::Device theirs) const override {
    return theirs.kind == transport::Device::Kind::kCpu || theirs.index < gpus_;
  }

 private:
  static void Put(base::ByteWriter& out, transport::Device device) {
    out.Put(static_cast<uint8_t>(device.kind));
    out.Put(device.index);
  }
  static transport::Device Get(base::ByteReader& in) {
    const auto kind = static_cast<transport::Device::Kind>(in.Get<uint8_t>());
    return {kind, in.Get<int16_t>()};
  }
  void Unpack(transport::Descriptor& descriptor) {
    base::ByteReader in(descriptor.header);
    const uint32_t count = in.Get<uint32_t>();
    before_.assign(count, {});
    for (uint32_t i = 0; i < count; ++i) {
      descriptor.tensors[i].source = Get(in);
      descriptor.tensors[i].target = Get(in);
      for (uint32_t left = in.Get<uint32_t>(); left > 0; --left) before_[i].insert(in.Get<Work>());
    }
    descriptor.header = std::string(in.GetRaw(in.remaining()));
  }

  const std::shared_ptr<transport::Pipe> inner_;
  const int gpus_;
  std::vector<Before> before_;  // Of the tensors announced last: one read at a time.
};

class GpuEndpoint final : public transport::Endpoint {
 public:
  GpuEndpoint(std::shared_ptr<transport::Endpoint> inner, int peers_gpus)
      : inner_(std::move(inner)), gpus_(peers_gpus) {}
  std::vector<std::string> addresses() const override { return inner_->addresses(); }
  int port() const override { return inner_->port(); }
  void OnPipe(absl::AnyInvocable<void(std::shared_ptr<transport::Pipe>)> on_pipe) override {
    inner_->OnPipe(
        [gpus = gpus_, on_pipe = std::move(on_pipe)](std::shared_ptr<transport::Pipe> pipe) mutable {
          on_pipe(std::make_shared<GpuPipe>(std::move(pipe), gpus));
        });
  }
  void Connect(std::vector<std::string> addresses, base::MemberId expected, transport::Lane lane,
               absl::Duration limit,
               absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<transport::Pipe>>)> done) override {
    inner_->Connect(std::move(addresses), std::move(expected), lane, limit,
                    [gpus = gpus_,
                     done = std::move(done)](absl::StatusOr<std::shared_ptr<transport::Pipe>> pipe) mutable {
                      if (pipe.ok()) *pipe = std::make_shared<GpuPipe>(*std::move(pipe), gpus);
                      std::move(done)(std::move(pipe));
                    });
  }
  void Defer(absl::AnyInvocable<void()> task) override { inner_->Defer(std::move(task)); }
  Counters counters() const override { return inner_->counters(); }
  void Close() override { inner_->Close(); }
  void Join() override { inner_->Join(); }

 private:
  const std::shared_ptr<transport::Endpoint> inner_;
  const int gpus_;
};

}  // namespace Atoll::cuda_test
