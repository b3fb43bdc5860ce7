#include "atoll/tests/cuda/fake_gpu.h"

#include <cstdlib>
#include <cstring>
#include <memory>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace Atoll::cuda_test {
namespace {

constexpr c10::StreamId kPool = 32;

using StreamKey = std::pair<int, c10::StreamId>;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, FakeGpu::kGpus> current_streams = {};

struct FakeEvent {
  Before before;
};

c10::Stream Make(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)), id);
}

}  // namespace

struct FakeGpu::State {
  absl::Mutex mu;
  Work next_work ABSL_GUARDED_BY(mu) = 1;
  std::map<StreamKey, Before> streams ABSL_GUARDED_BY(mu);
  std::array<c10::StreamId, FakeGpu::kGpus> next_pool ABSL_GUARDED_BY(mu) = {};
  c10::StreamId next_fresh ABSL_GUARDED_BY(mu) = 1000;
  std::map<const void*, std::set<c10::StreamId>> kept ABSL_GUARDED_BY(mu);
  bool waited ABSL_GUARDED_BY(mu) = false;
  std::map<StreamKey, std::unique_ptr<StreamKey>> handles ABSL_GUARDED_BY(mu);

  void* HandleOf(const c10::Stream& stream) {
    absl::MutexLock lock(&mu);
    auto& handle = handles[{stream.device_index(), stream.id()}];
    if (handle == nullptr) handle = std::make_unique<StreamKey>(stream.device_index(), stream.id());
    return handle.get();
  }
};

// LibTorch keeps one for the process; it speaks to the one FakeGpu.
class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit FakeGuard(FakeGpu::State* state) : state_(state) {}
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    current_device = device.index();
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, current_device); }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return Make(device.index(), current_streams.at(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return Make(device.index(), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    absl::MutexLock lock(&state_->mu);
    return Make(device.index(), 1 + state_->next_pool.at(device.index())++ % kPool);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = getStream(stream.device());
    current_streams.at(stream.device_index()) = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return state_->HandleOf(stream); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<FakeEvent*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new FakeEvent;
    absl::MutexLock lock(&state_->mu);
    static_cast<FakeEvent*>(*event)->before = state_->streams[{stream.device_index(), stream.id()}];
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const Before& before = static_cast<FakeEvent*>(event)->before;
    absl::MutexLock lock(&state_->mu);
    state_->streams[{stream.device_index(), stream.id()}].insert(before.begin(), before.end());
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { Waited(); }
  void synchronizeStream(const c10::Stream&) const override { Waited(); }
  void synchronizeDevice(c10::DeviceIndex) const override { Waited(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    absl::MutexLock lock(&state_->mu);
    state_->kept[data.get()].insert(stream.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return FakeGpu::kGpus; }

 private:
  void Waited() const {
    absl::MutexLock lock(&state_->mu);
    state_->waited = true;
  }
  FakeGpu::State* const state_;
};

namespace {

class HostMemory final : public c10::Allocator {
 public:
  explicit HostMemory(int device) : device_(c10::kCUDA, static_cast<c10::DeviceIndex>(device)) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes == 0 ? 1 : bytes);
    return {data, data, &std::free, device_};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  const c10::Device device_;
};

c10::Allocator* AllocatorOf(std::optional<at::Device> device) {
  static std::array<HostMemory*, FakeGpu::kGpus>* all = [] {
    auto* memory = new std::array<HostMemory*, FakeGpu::kGpus>;
    for (int i = 0; i < FakeGpu::kGpus; ++i) (*memory)[i] = new HostMemory(i);
    return memory;
  }();
  const int index = device.has_value() && device->has_index() ? device->index() : current_device;
  TORCH_CHECK(index >= 0 && index < FakeGpu::kGpus, "there is no such fake GPU");
  return (*all)[index];
}

const c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);

at::Tensor Empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, AllocatorOf(device), kCuda, dtype.value_or(at::kFloat), format);
}

at::Tensor EmptyStrided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, AllocatorOf(device), kCuda,
                                           dtype.value_or(at::kFloat));
}

// Element by element, so that any strides do. On a real GPU it runs on the current stream.
at::Tensor& CopyInto(at::Tensor& to, const at::Tensor& from, bool) {
  TORCH_CHECK(to.sizes() == from.sizes() && to.scalar_type() == from.scalar_type(), "only plain copies");
  FakeGpu& gpu = FakeGpu::Get();
  if (from.is_cuda()) gpu.LaunchHere(from.device().index());
  if (to.is_cuda()) {
    // Between two devices LibTorch itself orders their current streams.
    if (from.is_cuda()) gpu.JoinHere(to.device().index(), gpu.Here(from.device().index()));
    gpu.LaunchHere(to.device().index());
  }
  std::vector<int64_t> at(to.dim(), 0);
  const size_t bytes = to.element_size();
  for (int64_t n = 0; n < to.numel(); ++n) {
    int64_t to_offset = 0, from_offset = 0;
    for (int64_t d = 0; d < to.dim(); ++d) {
      to_offset += at[d] * to.stride(d);
      from_offset += at[d] * from.stride(d);
    }
    std::memcpy(static_cast<char*>(to.data_ptr()) + to_offset * bytes,
                static_cast<const char*>(from.const_data_ptr()) + from_offset * bytes, bytes);
    for (int64_t d = to.dim() - 1; d >= 0 && ++at[d] == to.size(d); --d) at[d] = 0;
  }
  return to;
}

at::Tensor AsStrided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor View(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", Empty);
  library.impl("empty_strided", EmptyStrided);
  library.impl("copy_", CopyInto);
  library.impl("view", View);
  library.impl("as_strided", AsStrided);
}

}  // namespace

FakeGpu::FakeGpu() : state_(new State) {
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new FakeGuard(state_));
}

FakeGpu& FakeGpu::Get() {
  static auto* gpu = new FakeGpu;
  return *gpu;
}

Work FakeGpu::Launch(const c10::Stream& stream) {
  absl::MutexLock lock(&state_->mu);
  state_->streams[{stream.device_index(), stream.id()}].insert(state_->next_work);
  return state_->next_work++;
}

Work FakeGpu::LaunchOn(void* handle) {
  const StreamKey key = *static_cast<StreamKey*>(handle);
  return Launch(Make(key.first, key.second));
}

Before FakeGpu::On(const c10::Stream& stream) {
  absl::MutexLock lock(&state_->mu);
  return state_->streams[{stream.device_index(), stream.id()}];
}

Before FakeGpu::OnHandle(void* handle) {
  const StreamKey key = *static_cast<StreamKey*>(handle);
  return On(Make(key.first, key.second));
}

void FakeGpu::Join(void* handle, const Before& before) {
  absl::MutexLock lock(&state_->mu);
  state_->streams[*static_cast<StreamKey*>(handle)].insert(before.begin(), before.end());
}

void FakeGpu::JoinHere(int device, const Before& before) {
  absl::MutexLock lock(&state_->mu);
  state_->streams[{device, current_streams.at(device)}].insert(before.begin(), before.end());
}

c10::Stream FakeGpu::Current(int device) { return Make(device, current_streams.at(device)); }

c10::Stream FakeGpu::Fresh(int device) {
  absl::MutexLock lock(&state_->mu);
  return Make(device, state_->next_fresh++);
}

std::set<c10::StreamId> FakeGpu::KeptFor(const at::Tensor& tensor) {
  absl::MutexLock lock(&state_->mu);
  return state_->kept[tensor.storage().data_ptr().get()];
}

bool FakeGpu::ever_waited_on_host() {
  absl::MutexLock lock(&state_->mu);
  return state_->waited;
}

}  // namespace Atoll::cuda_test
