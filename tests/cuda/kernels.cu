#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "atoll/tests/cuda/kernels.h"

namespace Atoll::cuda_test {
namespace {

__global__ void DelayKernel(int64_t nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (static_cast<int64_t>(now - start) < nanoseconds);
}

__global__ void FillKernel(uint32_t* data, size_t count, uint32_t value) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    data[i] = value;
}

__global__ void CountKernel(const uint32_t* data, size_t count, uint32_t value,
                            unsigned long long* differing) {
  unsigned long long mine = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    mine += data[i] != value;
  }
  if (mine != 0) atomicAdd(differing, mine);
}

void CheckLaunch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "launching %s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

}  // namespace

void Delay(void* stream, int64_t milliseconds) {
  DelayKernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(milliseconds * 1000000);
  CheckLaunch("a delay");
}

void Fill(uint32_t* data, size_t count, uint32_t value, void* stream) {
  FillKernel<<<128, 256, 0, static_cast<cudaStream_t>(stream)>>>(data, count, value);
  CheckLaunch("a fill");
}

void CountDiffering(const uint32_t* data, size_t count, uint32_t value, unsigned long long* differing,
                    void* stream) {
  CountKernel<<<128, 256, 0, static_cast<cudaStream_t>(stream)>>>(data, count, value, differing);
  CheckLaunch("a count");
}

}  // namespace Atoll::cuda_test
