// The seam between transport and CUDA. A process on the CPU loads no CUDA library; where there is a driver,
// the shared library libatoll_cuda.so is loaded, which implements this. It alone includes CUDA's headers
// and TensorPipe's CUDA channels, and links the CUDA half of LibTorch.
//
// The library exports
//   extern "C" Atoll::transport::CudaPlugin* AtollCreateCudaPlugin(int abi);
// which returns nullptr for an ABI that it was not built for. The object lives to the end of the process. The
// library has no Abseil of its own (Debian's static archives do not link into a shared library), so that
// nothing of Abseil crosses the virtual functions below.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "atoll/transport/pipe.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::transport {

inline constexpr int kCudaPluginAbi = 1;
inline constexpr char kCudaPluginLibrary[] = "libatoll_cuda.so";
inline constexpr char kCudaPluginEntry[] = "AtollCreateCudaPlugin";

/// Thread-safe.
class CudaPlugin {
 public:
  virtual ~CudaPlugin() = default;
  /// New channel contexts for one TensorPipe context, in falling order of priority, with the names that
  /// TensorPipe gives them ("cuda_ipc", "cuda_gdr", "cuda_basic" ...). `cpu` is the channel that cuda_basic
  /// uses between the hosts. Not viable ones may be among them; they are left out.
  virtual std::vector<std::pair<std::string, std::shared_ptr<tensorpipe::channel::Context>>> MakeChannels(
      std::shared_ptr<tensorpipe::channel::Context> cpu) = 0;
  /// `buffer` (of kind kCuda) as TensorPipe takes it. InvalidArgument if its memory is not on its device.
  absl::StatusOr<tensorpipe::Buffer> Wrap(const Buffer& buffer) {
    tensorpipe::Buffer wrapped;
    std::string why;
    if (!WrapOrSay(buffer, &wrapped, &why)) return absl::InvalidArgumentError(why);
    return wrapped;
  }

 protected:
  /// False, with the reason, where Wrap returns an error.
  virtual bool WrapOrSay(const Buffer& buffer, tensorpipe::Buffer* wrapped, std::string* why) = 0;
};

/// Loads the library, once a process; later calls return the same. nullptr where there is no driver or no
/// library: then a CUDA buffer is refused with FailedPrecondition and the text of `why`. Without a driver the
/// library is not touched, since it brings the CUDA half of LibTorch with it. `library` is its path; if empty
/// it is looked for beside the executable, in the library folder beside that, and where the system looks.
CudaPlugin* LoadCudaPlugin(std::string* why, const std::string& library = "");

}  // namespace Atoll::transport
