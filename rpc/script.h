// TorchScript modules as methods. The callee loads them itself; callers name them: no code ever travels. Off unless
// served.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/jit/api/module.h>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/synchronization/mutex.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/operators.h"

namespace Atoll::rpc {

/// The modules that an agent serves, by name. Thread-safe: modules may come, be replaced and go while calls run; a
/// call keeps the one that it began with. Calls of one module run side by side: it must bear that, as one that only
/// computes does.
class ScriptModules : public std::enable_shared_from_this<ScriptModules> {
 public:
  /// Serves the method "torch.script" v1 on `agent`'s pool, without recording gradients. AlreadyExists if served.
  static absl::StatusOr<std::shared_ptr<ScriptModules>> Serve(Agent* agent);

  /// `module` under `name` (1 to 128 bytes), instead of an earlier one.
  absl::Status Add(std::string name, torch::jit::Module module);
  /// What torch.jit.save wrote to `path`, on the CPU. NotFound, or InvalidArgument with LibTorch's text.
  absl::Status Load(std::string name, const std::string& path);
  /// False if there was none.
  bool Remove(absl::string_view name);
  std::vector<std::string> names() const;

 private:
  ScriptModules() = default;
  void Run(ServerCall call) const;

  mutable absl::Mutex mu_;
  absl::btree_map<std::string, torch::jit::Module> modules_ ABSL_GUARDED_BY(mu_);
};

struct ScriptCall {
  std::string module;
  std::string method = "forward";
  std::vector<c10::IValue> arguments;
};
/// Runs a method of a module that the member `to` serves. NotFound names the modules or methods that there are;
/// InvalidArgument: the arguments do not fit, with its schema; Internal: what the module threw. The result is one
/// value.
void CallScript(Agent* agent, absl::string_view to, ScriptCall call, CallOptions options, OnValues on_values);
base::Future<std::vector<c10::IValue>> CallScript(Agent* agent, absl::string_view to, ScriptCall call,
                                                  CallOptions options = {});

}  // namespace Atoll::rpc
