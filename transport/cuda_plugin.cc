#include "atoll/transport/cuda_plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>

#include "absl/strings/str_cat.h"

namespace Atoll::transport {
namespace {

struct Loaded {
  CudaPlugin* plugin = nullptr;
  std::string why;
};

std::string FolderOfExecutable() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return "";
  const std::string text(path, static_cast<size_t>(length));
  return text.substr(0, text.rfind('/'));
}

std::string FindLibrary() {
  const std::string folder = FolderOfExecutable();
  if (folder.empty()) return kCudaPluginLibrary;
  for (const char* place : {"/", "/../lib/", "/../lib/x86_64-linux-gnu/", "/../lib64/"}) {
    std::string path = absl::StrCat(folder, place, kCudaPluginLibrary);
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return kCudaPluginLibrary;  // The run path, LD_LIBRARY_PATH, the system's folders.
}

Loaded Load(const std::string& given) {
  if (dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) == nullptr)
    return {nullptr, "this machine has no CUDA driver"};
  const std::string path = given.empty() ? FindLibrary() : given;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return {nullptr, absl::StrCat("cannot load ", path, ": ", dlerror())};
  auto* create = reinterpret_cast<CudaPlugin* (*)(int)>(dlsym(library, kCudaPluginEntry));
  if (create == nullptr) return {nullptr, absl::StrCat(path, " lacks ", kCudaPluginEntry)};
  CudaPlugin* plugin = create(kCudaPluginAbi);
  if (plugin == nullptr) return {nullptr, absl::StrCat(path, " is of another version of Atoll")};
  return {plugin, ""};
}

}  // namespace

CudaPlugin* LoadCudaPlugin(std::string* why, const std::string& library) {
  // A library is loaded once a process, whoever asks: constant from then on.
  static const Loaded loaded = Load(library);
  if (why != nullptr) *why = loaded.why;
  return loaded.plugin;
}

}  // namespace Atoll::transport
