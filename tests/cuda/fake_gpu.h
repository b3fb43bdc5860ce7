// GPUs that are not there: LibTorch's generic device "cuda" with memory of the host, and streams that keep
// account of what comes before what. A process that has no CUDA may so test, on any machine, that tensors
// land where device maps say and that every order a real GPU needs has been asked for. Kernels are numbers:
// Launch() enqueues one, and a stream knows all that will be done when it is.
#pragma once

#include <array>
#include <map>
#include <set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace Atoll::cuda_test {

using Work = int64_t;
using Before = std::set<Work>;

class FakeGpu {
 public:
  static constexpr int kGpus = 4;
  /// Registers the devices with LibTorch; once a process, to its end.
  static FakeGpu& Get();

  /// Enqueues something on a stream.
  Work Launch(const c10::Stream& stream);
  Work LaunchHere(int device) { return Launch(Current(device)); }
  Work LaunchOn(void* handle);
  /// All that comes before whatever is enqueued next.
  Before On(const c10::Stream& stream);
  Before OnHandle(void* handle);
  Before Here(int device) { return On(Current(device)); }
  /// What is enqueued next comes after `before` too.
  void Join(void* handle, const Before& before);
  void JoinHere(int device, const Before& before);
  c10::Stream Current(int device);
  /// A stream that is nobody's else.
  c10::Stream Fresh(int device);

  /// Streams that the storage of `tensor` is kept for beside the one it was made on.
  std::set<c10::StreamId> KeptFor(const at::Tensor& tensor);
  bool ever_waited_on_host();

 private:
  friend class FakeGuard;
  struct State;
  FakeGpu();
  State* const state_;
};

}  // namespace Atoll::cuda_test
