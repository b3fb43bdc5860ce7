// Kernels that make an error of ordering visible: a delay, so that what is not waited for is not there yet; a
// fill; and a count of what differs, launched at once by who was told that bytes are there.
#pragma once

#include <cstddef>
#include <cstdint>

namespace Atoll::cuda_test {

/// All on the current device; `stream` is a cudaStream_t. They abort the test on a CUDA error.
void Delay(void* stream, int64_t milliseconds);
void Fill(uint32_t* data, size_t count, uint32_t value, void* stream);
/// Adds to `*differing` (memory of the GPU) how many of `data` are not `value`.
void CountDiffering(const uint32_t* data, size_t count, uint32_t value, unsigned long long* differing,
                    void* stream);

}  // namespace Atoll::cuda_test
