// ATen's operators as methods: at::add on a tensor that is elsewhere, without a method of one's own for it. Off
// unless served. A program that serves them lets every member of its job run them.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

/// Which operators are served. Of those that it names, an operator is served if its arguments are tensors and plain
/// values (numbers, bools, strings, lists of them, options): never one that takes a file's name, a storage, a
/// generator, a device's stream or a class.
struct OperatorRule {
  /// "aten::add.Tensor" is one overload ("aten::relu" where it has no name), "aten::add.*" each of aten::add's, and
  /// "aten::*" each of the namespace's that is for users: none whose name begins with '_' or has "unsafe" in it.
  std::vector<std::string> allow = {"aten::*"};
};

/// Serves the method "torch.operator" v1. AlreadyExists if it is served, InvalidArgument for a rule that names
/// nothing. Operators run on the agent's pool, without recording gradients, on copies of what the caller sent.
absl::Status ServeOperators(Agent* agent, OperatorRule rule = {});

struct OperatorCall {
  /// "aten::add.Tensor", or "aten::add": the callee then takes the first overload that the arguments fit.
  std::string name;
  std::vector<c10::IValue> arguments;
  std::vector<std::pair<std::string, c10::IValue>> keywords = {};
};
using OnValues = absl::AnyInvocable<void(absl::StatusOr<std::vector<c10::IValue>>)>;

/// Runs an operator on the member `to`, as Agent::Call does. NotFound: there is no such operator; PermissionDenied:
/// the rule does not allow it; InvalidArgument: the arguments do not fit, with its schema; Internal: what the operator
/// threw.
void CallOperator(Agent* agent, absl::string_view to, OperatorCall call, CallOptions options,
                  OnValues on_values);
base::Future<std::vector<c10::IValue>> CallOperator(Agent* agent, absl::string_view to, OperatorCall call,
                                                    CallOptions options = {});

/// For other methods of values: makes a call, and decodes its answer.
void CallValues(Agent* agent, absl::string_view to, const MethodId& method, std::vector<c10::IValue> values,
                CallOptions options, OnValues on_values);
base::Future<std::vector<c10::IValue>> CallValues(Agent* agent, absl::string_view to, const MethodId& method,
                                                  std::vector<c10::IValue> values, CallOptions options = {});

}  // namespace Atoll::rpc
