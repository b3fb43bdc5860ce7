#include "atoll/rpc/script.h"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/serialization/import.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/values.h"

namespace Atoll::rpc {
namespace {

const MethodId kScript{"torch.script", 1};
constexpr size_t kMaxName = 128;

std::vector<c10::IValue> ToValues(ScriptCall call) {
  return {std::move(call.module), std::move(call.method),
          c10::ivalue::Tuple::create(std::move(call.arguments))};
}

}  // namespace

absl::StatusOr<std::shared_ptr<ScriptModules>> ScriptModules::Serve(Agent* agent) {
  std::shared_ptr<ScriptModules> modules(new ScriptModules());
  ATOLL_RETURN_IF_ERROR(
      agent->Register(kScript, [modules](ServerCall call) { modules->Run(std::move(call)); }));
  return modules;
}

absl::Status ScriptModules::Add(std::string name, torch::jit::Module module) {
  if (name.empty() || name.size() > kMaxName) {
    return absl::InvalidArgumentError(
        absl::StrCat("a module's name is 1 to ", kMaxName, " bytes, and this has ", name.size()));
  }
  absl::MutexLock lock(&mu_);
  modules_.insert_or_assign(std::move(name), std::move(module));
  return absl::OkStatus();
}

absl::Status ScriptModules::Load(std::string name, const std::string& path) {
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return base::ErrnoStatus(errno, path);
  try {
    torch::jit::Module module = torch::jit::load(path, c10::Device(c10::kCPU));
    module.eval();
    return Add(std::move(name), std::move(module));
  } catch (...) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is no TorchScript module: ", ExceptionText()));
  }
}

bool ScriptModules::Remove(absl::string_view name) {
  absl::MutexLock lock(&mu_);
  return modules_.erase(name) > 0;
}

std::vector<std::string> ScriptModules::names() const {
  std::vector<std::string> names;
  absl::MutexLock lock(&mu_);
  for (const auto& [name, module] : modules_) names.push_back(name);
  return names;
}

void ScriptModules::Run(ServerCall call) const {
  auto reply = [&]() -> absl::StatusOr<Payload> {
    ATOLL_ASSIGN_OR_RETURN(std::vector<c10::IValue> values, DecodeValues(call.request));
    if (values.size() != 3 || !values[0].isString() || !values[1].isString() || !values[2].isTuple()) {
      return absl::InvalidArgumentError("a call of a script is its module, its method and its arguments");
    }
    std::optional<torch::jit::Module> module;
    {
      absl::MutexLock lock(&mu_);
      auto found = modules_.find(values[0].toStringRef());
      if (found != modules_.end()) module = found->second;
    }
    if (!module.has_value()) {
      return absl::NotFoundError(absl::StrCat("it serves no module '", values[0].toStringRef(),
                                              "'; it serves ", absl::StrJoin(names(), ", ")));
    }
    const auto method = module->find_method(values[1].toStringRef());
    if (!method.has_value()) {
      std::vector<std::string> known;
      for (const auto& each : module->get_methods()) known.push_back(each.name());
      return absl::NotFoundError(absl::StrCat("the module '", values[0].toStringRef(), "' has no method '",
                                              values[1].toStringRef(), "'; it has ",
                                              absl::StrJoin(known, ", ")));
    }
    std::vector<c10::IValue> stack = values[2].toTupleRef().elements().vec();
    values.clear();
    try {
      std::vector<c10::IValue> checked = {module->_ivalue()};
      checked.insert(checked.end(), stack.begin(), stack.end());
      method->function().getSchema().checkAndNormalizeInputs(checked);
    } catch (...) {
      return absl::InvalidArgumentError(ExceptionText());
    }
    const c10::AutoGradMode no_grad(false);
    try {
      return EncodeValues({(*method)(std::move(stack))});
    } catch (...) {
      return absl::InternalError(ExceptionText());
    }
  };
  std::move(call.responder).Reply(reply());
}

void CallScript(Agent* agent, absl::string_view to, ScriptCall call, CallOptions options,
                OnValues on_values) {
  CallValues(agent, to, kScript, ToValues(std::move(call)), std::move(options), std::move(on_values));
}

base::Future<std::vector<c10::IValue>> CallScript(Agent* agent, absl::string_view to, ScriptCall call,
                                                  CallOptions options) {
  return CallValues(agent, to, kScript, ToValues(std::move(call)), std::move(options));
}

}  // namespace Atoll::rpc
