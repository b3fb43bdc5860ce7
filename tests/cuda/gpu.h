// Memory and streams of a GPU for tests. Every CUDA error ends the test at once.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "atoll/tests/cuda/kernels.h"
#include "atoll/transport/pipe.h"

namespace Atoll::cuda_test {

inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

inline int GpuCount() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// First line of every test of this folder that needs a GPU.
#define ATOLL_NEEDS_GPU()                                                                         \
  if (::Atoll::cuda_test::GpuCount() == 0) {                                                      \
    GTEST_SKIP() << "ATOLL_TEST_SKIPPED: no GPU here (" << cudaGetErrorString(cudaGetLastError()) \
                 << "); nothing of CUDA has been tested";                                         \
  }                                                                                               \
  static_assert(true)

/// A stream that the default stream does not wait for: an order that is not made is then not there.
class Stream {
 public:
  explicit Stream(int device = 0) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Stream() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void Wait() const { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// `count` words on a GPU, all `value` to begin with.
class Words {
 public:
  explicit Words(size_t count, uint32_t value = 0, int device = 0) : count_(count), device_(device) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(cudaMalloc(&data_, count * sizeof(uint32_t)), "cudaMalloc");
    Fill(data_, count_, value, nullptr);
    Check(cudaDeviceSynchronize(), "the first fill");
  }
  ~Words() { cudaFree(data_); }
  Words(const Words&) = delete;

  uint32_t* data() const { return data_; }
  size_t count() const { return count_; }
  transport::Device device() const { return {transport::Device::Kind::kCuda, static_cast<int16_t>(device_)}; }
  transport::Buffer buffer(const Stream& stream) const {
    return {data_, count_ * sizeof(uint32_t), device(), stream.get()};
  }
  std::vector<uint32_t> Copy() const {
    std::vector<uint32_t> words(count_);
    Check(cudaMemcpy(words.data(), data_, count_ * sizeof(uint32_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return words;
  }

 private:
  uint32_t* data_ = nullptr;
  const size_t count_;
  const int device_;
};

/// Counts, on a stream, how many words of a buffer are not `value`, as of then.
class Witness {
 public:
  explicit Witness(int device = 0) {
    Check(cudaSetDevice(device), "cudaSetDevice");
    Check(cudaMalloc(&differing_, sizeof *differing_), "cudaMalloc");
    Check(cudaMemset(differing_, 0, sizeof *differing_), "cudaMemset");
    Check(cudaDeviceSynchronize(), "cudaMemset");
  }
  ~Witness() { cudaFree(differing_); }
  Witness(const Witness&) = delete;

  void Count(const uint32_t* data, size_t count, uint32_t value, void* stream) {
    CountDiffering(data, count, value, differing_, stream);
  }
  void Look(const Words& words, uint32_t value, void* stream) {
    Count(words.data(), words.count(), value, stream);
  }
  /// Waits for the GPU.
  unsigned long long differing() const {
    unsigned long long result = 0;
    Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    Check(cudaMemcpy(&result, differing_, sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return result;
  }

 private:
  unsigned long long* differing_ = nullptr;
};

}  // namespace Atoll::cuda_test
