// libatoll_cuda.so: TensorPipe's CUDA channels, and our buffers on a GPU as TensorPipe takes them. The only
// code of transport that links CUDA; cuda_plugin.h tells how it is loaded.
//
// What TensorPipe's channels promise, and Pipe with them: a send copies after what its stream holds when it
// is called, and its callback comes once that copy is enqueued (cuda_ipc) or done (the others); a receive
// enqueues its copy on its stream and calls back at once. No channel stops a stream, but for cuda_ipc's first
// use of a device.
#include <cuda_runtime.h>
#include <tensorpipe/tensorpipe_cuda.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "atoll/transport/cuda_plugin.h"

namespace Atoll::transport {
namespace {

using ChannelContext = tensorpipe::channel::Context;

/// A channel whose look at a peer's devices cannot throw. cuda_ipc's does (TensorPipe of torch 2.11.0) where
/// NVML does not list the peer's GPU: two containers on one host with a GPU each. Such a pair then has the
/// next channel.
class ToldApart final : public ChannelContext {
 public:
  explicit ToldApart(std::shared_ptr<ChannelContext> inner) : inner_(std::move(inner)) {}
  bool isViable() const override { return inner_->isViable(); }
  size_t numConnectionsNeeded() const override { return inner_->numConnectionsNeeded(); }
  const std::unordered_map<tensorpipe::Device, std::string>& deviceDescriptors() const override {
    return inner_->deviceDescriptors();
  }
  bool canCommunicateWithRemote(const std::string& local, const std::string& remote) const override {
    try {
      return inner_->canCommunicateWithRemote(local, remote);
    } catch (const std::exception&) {
      return false;
    }
  }
  std::shared_ptr<tensorpipe::channel::Channel> createChannel(
      std::vector<std::shared_ptr<tensorpipe::transport::Connection>> connections,
      tensorpipe::channel::Endpoint endpoint) override {
    return inner_->createChannel(std::move(connections), endpoint);
  }
  void setId(std::string id) override { inner_->setId(std::move(id)); }
  void close() override { inner_->close(); }
  void join() override { inner_->join(); }

 private:
  const std::shared_ptr<ChannelContext> inner_;
};

class Plugin final : public CudaPlugin {
 public:
  std::vector<std::pair<std::string, std::shared_ptr<ChannelContext>>> MakeChannels(
      std::shared_ptr<ChannelContext> cpu) override {
    namespace channel = tensorpipe::channel;
    std::vector<std::pair<std::string, std::shared_ptr<ChannelContext>>> channels;
    auto add = [&](const char* name, const std::function<std::shared_ptr<ChannelContext>()>& create) {
      try {
        channels.emplace_back(name, std::make_shared<ToldApart>(create()));
      } catch (const std::exception&) {
        // Not viable: a driver that refuses what the channel asks of it at its start.
      }
    };
    // Ranks of one process; of one host; of hosts joined by InfiniBand; all others, through pinned memory.
    add("cuda_xth", [] { return channel::cuda_xth::create(); });
#if TENSORPIPE_HAS_CUDA_IPC_CHANNEL
    add("cuda_ipc", [] { return channel::cuda_ipc::create(); });
#endif
#if TENSORPIPE_HAS_CUDA_GDR_CHANNEL
    add("cuda_gdr", [] { return channel::cuda_gdr::create(); });
#endif
    add("cuda_basic", [&] { return channel::cuda_basic::create(cpu); });
    return channels;
  }

  bool WrapOrSay(const Buffer& buffer, tensorpipe::Buffer* wrapped, std::string* why) override {
    const int index = buffer.device.index;
    const int count = c10::cuda::device_count();
    *why = "a buffer on " + Name(index);
    if (index < 0 || index >= count) {
      *why += ", but this process has " + std::to_string(count) + " GPUs";
      return false;
    }
    try {
      // Asking about memory makes a context on the current device, so that must be the right one.
      c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
      cudaPointerAttributes attributes;
      const cudaError_t error = cudaPointerGetAttributes(&attributes, buffer.data);
      if (error != cudaSuccess) {
        cudaGetLastError();  // Else the next launch of a kernel reports it.
        *why += std::string(": ") + cudaGetErrorString(error);
        return false;
      }
      if (attributes.type != cudaMemoryTypeDevice || attributes.device != index) {
        *why +=
            " whose memory is " + (attributes.type == cudaMemoryTypeDevice ? "on " + Name(attributes.device)
                                                                           : std::string("no GPU's"));
        return false;
      }
    } catch (const std::exception& error) {
      *why += std::string(": ") + error.what();
      return false;
    }
    *wrapped = tensorpipe::CudaBuffer{buffer.data, static_cast<cudaStream_t>(buffer.cuda_stream)};
    return true;
  }

 private:
  static std::string Name(int index) { return "cuda:" + std::to_string(index); }
};

}  // namespace
}  // namespace Atoll::transport

extern "C" __attribute__((visibility("default"))) Atoll::transport::CudaPlugin* AtollCreateCudaPlugin(
    int abi) {
  if (abi != Atoll::transport::kCudaPluginAbi) return nullptr;
  // One a process, to its end: its channels' threads may outlive every other object.
  static auto* plugin = new Atoll::transport::Plugin;
  return plugin;
}
