# Torch from the pinned PyPI wheel, without find_package(Torch): that asks for the whole CUDA toolkit
# and every NVIDIA package at configure time, and links all of them.
#   ATOLL_TORCH_DIR  the installed `torch` folder (default: the virtual environment's)
# gives Torch::cpu (torch_cpu, c10), Atoll's fence Torch::tensorpipe, and with the CUDA toolkit
# Torch::cuda.
set(ATOLL_TORCH_VERSION 2.11.0)
if(NOT ATOLL_TORCH_DIR)
  file(GLOB ATOLL_TORCH_DIR ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch)
endif()
if(NOT EXISTS "${ATOLL_TORCH_DIR}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "No torch at '${ATOLL_TORCH_DIR}'. Run ./dev setup, or name an installed "
    "torch ${ATOLL_TORCH_VERSION} with ./dev build --torch DIR.")
endif()
file(READ "${ATOLL_TORCH_DIR}/version.py" ATOLL_TORCH_VERSION_TEXT)
string(REGEX MATCH "__version__ = '([0-9.]+)" _ "${ATOLL_TORCH_VERSION_TEXT}")
if(NOT CMAKE_MATCH_1 VERSION_EQUAL ATOLL_TORCH_VERSION)
  message(FATAL_ERROR "torch at ${ATOLL_TORCH_DIR} is ${CMAKE_MATCH_1}; Atoll needs "
    "${ATOLL_TORCH_VERSION}: its TensorPipe and its autograd nodes have no stable interface.")
endif()

# The CUDA toolkit, or none: ATOLL_CUDA_HOME (cache or environment) names it, "none" goes without.
if(NOT ATOLL_CUDA_HOME)
  set(ATOLL_CUDA_HOME $ENV{ATOLL_CUDA_HOME})
endif()
if(NOT ATOLL_CUDA_HOME)
  set(ATOLL_CUDA_HOME /usr/local/cuda)
endif()
unset(ATOLL_NVCC CACHE)
if(EXISTS ${ATOLL_CUDA_HOME}/bin/nvcc)
  set(ATOLL_NVCC ${ATOLL_CUDA_HOME}/bin/nvcc)
endif()

# libtorch_cpu.so of the wheel needs libcudart.so.13 and libcupti.so.13: from the toolkit, or from
# their two PyPI packages in the same site-packages.
get_filename_component(ATOLL_SITE_PACKAGES ${ATOLL_TORCH_DIR} DIRECTORY)
set(ATOLL_TORCH_RUNPATH ${ATOLL_TORCH_DIR}/lib)
foreach(dir ${ATOLL_CUDA_HOME}/lib64 ${ATOLL_CUDA_HOME}/extras/CUPTI/lib64
    ${ATOLL_SITE_PACKAGES}/nvidia/cu13/lib ${ATOLL_SITE_PACKAGES}/nvidia/nvshmem/lib
    ${ATOLL_SITE_PACKAGES}/nvidia/cusparselt/lib ${ATOLL_SITE_PACKAGES}/nvidia/cudnn/lib
    ${ATOLL_SITE_PACKAGES}/nvidia/nccl/lib)
  if(EXISTS ${dir})
    list(APPEND ATOLL_TORCH_RUNPATH ${dir})
  endif()
endforeach()
set(CMAKE_BUILD_RPATH ${CMAKE_BUILD_RPATH} ${ATOLL_TORCH_RUNPATH})
foreach(needed libcudart.so.13 libcupti.so.13)
  find_library(found_${needed} NAMES ${needed} PATHS ${ATOLL_TORCH_RUNPATH} NO_CACHE)
  if(NOT found_${needed})
    message(FATAL_ERROR "${needed}, which torch's libtorch_cpu.so links, is neither in the CUDA toolkit "
      "(${ATOLL_CUDA_HOME}) nor in ${ATOLL_SITE_PACKAGES}/nvidia. Run ./dev setup, or install "
      "nvidia-cuda-runtime==13.0.96 and nvidia-cuda-cupti==13.0.85 beside torch.")
  endif()
endforeach()

# The Python beside torch, else any: it runs the tests, and those that need torch's Python ask it for that.
find_program(ATOLL_PYTHON NAMES python3 HINTS ${ATOLL_SITE_PACKAGES}/../../../bin)

if(TARGET Torch::cpu)
  return()  # find_package(Atoll) in several folders of a project.
endif()
add_library(Torch::c10 SHARED IMPORTED GLOBAL)
set_target_properties(Torch::c10 PROPERTIES IMPORTED_LOCATION ${ATOLL_TORCH_DIR}/lib/libc10.so)
add_library(Torch::cpu SHARED IMPORTED GLOBAL)
set_target_properties(Torch::cpu PROPERTIES
  IMPORTED_LOCATION ${ATOLL_TORCH_DIR}/lib/libtorch_cpu.so
  INTERFACE_COMPILE_DEFINITIONS USE_DISTRIBUTED)
target_include_directories(Torch::cpu SYSTEM INTERFACE
  ${ATOLL_TORCH_DIR}/include ${ATOLL_TORCH_DIR}/include/torch/csrc/api/include)
# DT_RPATH, not DT_RUNPATH: it also serves what libtorch_cpu.so itself needs (cudart, cupti).
target_link_options(Torch::cpu INTERFACE -Wl,--disable-new-dtags -Wl,--allow-shlib-undefined)
target_link_libraries(Torch::cpu INTERFACE Torch::c10)

# TensorPipe's headers that the wheel lacks (transport/connection.h, nop) are Debian's, byte for byte
# the same; the wheel's folder must win where both have one, and Debian's library is never linked.
add_library(Torch::tensorpipe INTERFACE IMPORTED GLOBAL)
target_link_libraries(Torch::tensorpipe INTERFACE Torch::cpu)

if(ATOLL_NVCC)
  add_library(Torch::c10_cuda SHARED IMPORTED GLOBAL)
  set_target_properties(Torch::c10_cuda PROPERTIES
    IMPORTED_LOCATION ${ATOLL_TORCH_DIR}/lib/libc10_cuda.so)
  target_include_directories(Torch::c10_cuda SYSTEM INTERFACE ${ATOLL_CUDA_HOME}/include)
  target_link_libraries(Torch::c10_cuda INTERFACE Torch::c10)
  add_library(Torch::cuda SHARED IMPORTED GLOBAL)
  set_target_properties(Torch::cuda PROPERTIES
    IMPORTED_LOCATION ${ATOLL_TORCH_DIR}/lib/libtorch_cuda.so)
  target_link_libraries(Torch::cuda INTERFACE Torch::cpu Torch::c10_cuda)
endif()
