# CUDA for the library atoll_cuda alone. CMake 3.25 knows CUDA dialects only up to 17 while torch's
# headers need 20, so that one is spelled out; the runtime is the shared one that torch has loaded too.
set(CMAKE_CUDA_COMPILER ${ATOLL_NVCC})
set(CMAKE_CUDA_ARCHITECTURES 80 90)
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
