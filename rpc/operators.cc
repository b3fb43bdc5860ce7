#include "atoll/rpc/operators.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/jit_type.h>
#include <c10/core/GradMode.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/user_code.h"
#include "atoll/rpc/values.h"

namespace Atoll::rpc {
namespace {

const MethodId kOperator{"torch.operator", 1};

bool IsPlain(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::NoneType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return true;
    case c10::TypeKind::ListType:
    case c10::TypeKind::OptionalType:
      return std::all_of(type.containedTypes().begin(), type.containedTypes().end(),
                         [](const c10::TypePtr& inner) { return IsPlain(*inner); });
    default:
      return false;
  }
}

/// Empty, or what stands in the way of serving it.
std::string Unfit(const c10::FunctionSchema& schema) {
  for (const c10::Argument& argument : schema.arguments()) {
    // None is what a caller can give for it: its default.
    const c10::Type& type = *argument.type();
    const bool optional_device = type.kind() == c10::TypeKind::OptionalType &&
                                 type.containedTypes()[0]->kind() == c10::TypeKind::DeviceObjType;
    if (!IsPlain(type) && !optional_device) {
      return absl::StrCat("its argument '", argument.name(), "' is a ", type.str());
    }
    for (absl::string_view word : {"file", "path", "url"}) {
      if (absl::StrContains(argument.name(), word))
        return absl::StrCat("its argument '", argument.name(), "' names a file");
    }
  }
  if (schema.is_vararg()) return "it takes any number of arguments";
  return "";
}

/// A dtype, layout or memory format is an int in a schema's eyes, and an index into LibTorch's tables in its own.
absl::Status CheckCodes(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments) {
  for (size_t i = 0; i < arguments.size() && i < schema.arguments().size(); ++i) {
    const c10::Type* type = schema.arguments()[i].real_type().get();
    while (type->kind() == c10::TypeKind::OptionalType || type->kind() == c10::TypeKind::ListType) {
      type = type->containedTypes()[0].get();
    }
    int64_t count = 0;
    if (type->kind() == c10::TypeKind::ScalarTypeType)
      count = static_cast<int64_t>(at::ScalarType::NumOptions);
    if (type->kind() == c10::TypeKind::LayoutType) count = static_cast<int64_t>(at::Layout::NumOptions);
    if (type->kind() == c10::TypeKind::MemoryFormatType)
      count = static_cast<int64_t>(at::MemoryFormat::NumOptions);
    const auto outside = [count](int64_t code) { return code < 0 || code >= count; };
    bool wrong = false;
    if (count > 0 && arguments[i].isInt()) wrong = outside(arguments[i].toInt());
    if (count > 0 && arguments[i].isIntList()) {
      for (int64_t code : arguments[i].toIntVector()) wrong = wrong || outside(code);
    }
    if (wrong) {
      return absl::InvalidArgumentError(absl::StrCat("the argument '", schema.arguments()[i].name(),
                                                     "' is no ", type->str(), ": codes are 0 to ",
                                                     count - 1));
    }
  }
  return absl::OkStatus();
}

std::string FullName(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : absl::StrCat(name.name, ".", name.overload_name);
}

class Operators {
 public:
  explicit Operators(OperatorRule rule) : rule_(std::move(rule)) {}

  static absl::Status Check(const OperatorRule& rule) {
    for (const std::string& pattern : rule.allow) {
      const size_t colons = pattern.find("::");
      if (colons != std::string::npos && colons > 0 && colons + 2 < pattern.size()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "an allow rule '", pattern, "': it should be like aten::add.Tensor, aten::add.* or aten::*"));
    }
    return absl::OkStatus();
  }

  /// The overloads that `name` can mean, in the dispatcher's order, those not allowed among them.
  absl::StatusOr<std::vector<c10::OperatorHandle>> Find(const std::string& name) {
    const size_t dot = name.find('.');
    const std::string base = name.substr(0, dot);
    std::vector<c10::OperatorHandle> found;
    if (dot != std::string::npos) {
      auto exact = c10::Dispatcher::singleton().findSchema({base, name.substr(dot + 1)});
      if (exact.has_value()) found.push_back(*exact);
    } else {
      for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
        if (each.name != base) continue;
        auto handle = c10::Dispatcher::singleton().findSchema(each);
        if (handle.has_value()) found.push_back(*handle);
      }
      // Overload resolution is not the dispatcher's: the plain one first, those that write into an argument last.
      std::stable_sort(found.begin(), found.end(),
                       [](const auto& a, const auto& b) { return Order(a) < Order(b); });
    }
    if (found.empty()) return absl::NotFoundError(absl::StrCat("there is no operator ", name));
    return found;
  }

  absl::Status Allows(const c10::OperatorHandle& op) const {
    const std::string name = FullName(op.operator_name());
    const auto fits = [&](const std::string& pattern) {
      // Those that are not meant for users believe what they are given: each must be named.
      const size_t own = name.find("::") + 2;
      const bool hidden = name[own] == '_' || absl::StrContains(name, "unsafe");
      if (absl::EndsWith(pattern, "::*")) {
        return !hidden && absl::StartsWith(name, pattern.substr(0, pattern.size() - 1));
      }
      if (absl::EndsWith(pattern, ".*")) {
        const std::string base = pattern.substr(0, pattern.size() - 2);
        return name == base || absl::StartsWith(name, base + ".");
      }
      return name == pattern;
    };
    if (std::none_of(rule_.allow.begin(), rule_.allow.end(), fits)) {
      return absl::PermissionDeniedError(absl::StrCat("the operator ", name, " is not allowed here"));
    }
    const std::string unfit = Unfit(op.schema());
    if (!unfit.empty()) {
      return absl::PermissionDeniedError(absl::StrCat("the operator ", name, " is not served: ", unfit));
    }
    return absl::OkStatus();
  }

  /// Runs it on `stack`, which is then its results.
  absl::Status Run(const std::string& name, std::vector<c10::IValue>* stack,
                   const std::unordered_map<std::string, c10::IValue>& keywords) {
    ATOLL_ASSIGN_OR_RETURN(const std::vector<c10::OperatorHandle> candidates, Find(name));
    absl::Status first;
    for (const c10::OperatorHandle& op : candidates) {
      absl::Status status = Allows(op);
      std::vector<c10::IValue> arguments = *stack;
      if (status.ok()) {
        try {
          op.schema().checkAndNormalizeInputs(arguments, keywords);
          status = CheckCodes(op.schema(), arguments);
        } catch (...) {
          status = absl::InvalidArgumentError(ExceptionText());
        }
      }
      if (!status.ok()) {
        if (first.ok()) first = status;
        continue;
      }
      const c10::AutoGradMode no_grad(false);
      try {
        op.callBoxed(arguments);
      } catch (...) {
        return absl::InternalError(absl::StrCat(FullName(op.operator_name()), ": ", ExceptionText()));
      }
      *stack = std::move(arguments);
      return absl::OkStatus();
    }
    return first;
  }

 private:
  static int Order(const c10::OperatorHandle& op) {
    const std::string& overload = op.operator_name().overload_name;
    if (absl::StrContains(overload, "out")) return 2;
    return overload == "Tensor" || overload.empty() ? 0 : 1;
  }

  const OperatorRule rule_;
};

void Serve(Operators& operators, ServerCall call) {
  auto reply = [&]() -> absl::StatusOr<Payload> {
    ATOLL_ASSIGN_OR_RETURN(std::vector<c10::IValue> values, DecodeValues(call.request));
    if (values.size() != 3 || !values[0].isString() || !values[1].isTuple() || !values[2].isTuple()) {
      return absl::InvalidArgumentError("a call of an operator is its name, its arguments and its keywords");
    }
    std::vector<c10::IValue> stack = values[1].toTupleRef().elements().vec();
    std::unordered_map<std::string, c10::IValue> keywords;
    const std::vector<c10::IValue> pairs = values[2].toTupleRef().elements().vec();
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) {
      if (!pairs[i].isString()) return absl::InvalidArgumentError("a keyword that is no string");
      keywords.emplace(pairs[i].toStringRef(), pairs[i + 1]);
    }
    const std::string name = values[0].toStringRef();
    values.clear();
    ATOLL_RETURN_IF_ERROR(operators.Run(name, &stack, keywords));
    return EncodeValues(std::move(stack));
  };
  std::move(call.responder).Reply(reply());
}

std::vector<c10::IValue> ToValues(OperatorCall call) {
  std::vector<c10::IValue> keywords;
  for (auto& [name, value] : call.keywords) {
    keywords.emplace_back(name);
    keywords.push_back(std::move(value));
  }
  return {std::move(call.name), c10::ivalue::Tuple::create(std::move(call.arguments)),
          c10::ivalue::Tuple::create(std::move(keywords))};
}

}  // namespace

absl::Status ServeOperators(Agent* agent, OperatorRule rule) {
  ATOLL_RETURN_IF_ERROR(Operators::Check(rule));
  auto operators = std::make_shared<Operators>(std::move(rule));
  return agent->Register(kOperator, [operators](ServerCall call) { Serve(*operators, std::move(call)); });
}

void CallValues(Agent* agent, absl::string_view to, const MethodId& method, std::vector<c10::IValue> values,
                CallOptions options, OnValues on_values) {
  absl::StatusOr<Payload> request = EncodeValues(std::move(values));
  if (!request.ok()) {
    return agent->pool()->Schedule([on_values = std::move(on_values), to = std::string(to), method,
                                    status = request.status()]() mutable {
      RunCallback(kOnReply, std::move(on_values),
                  absl::StatusOr<std::vector<c10::IValue>>(base::WithRan(
                      base::Annotate(status, absl::StrCat("calling ", method.name, " on ", to, " (ran: no)")),
                      base::Ran::kNo)));
    });
  }
  agent->Call(to, method, *std::move(request), std::move(options),
              [on_values = std::move(on_values)](absl::StatusOr<Received> reply) mutable {
                if (!reply.ok()) return std::move(on_values)(reply.status());
                std::move(on_values)(DecodeValues(*reply));
              });
}

base::Future<std::vector<c10::IValue>> CallValues(Agent* agent, absl::string_view to, const MethodId& method,
                                                  std::vector<c10::IValue> values, CallOptions options) {
  base::Promise<std::vector<c10::IValue>> promise;
  CallValues(agent, to, method, std::move(values), std::move(options),
             [promise](absl::StatusOr<std::vector<c10::IValue>> result) { promise.Set(std::move(result)); });
  return promise.future();
}

void CallOperator(Agent* agent, absl::string_view to, OperatorCall call, CallOptions options,
                  OnValues on_values) {
  CallValues(agent, to, kOperator, ToValues(std::move(call)), std::move(options), std::move(on_values));
}

base::Future<std::vector<c10::IValue>> CallOperator(Agent* agent, absl::string_view to, OperatorCall call,
                                                    CallOptions options) {
  return CallValues(agent, to, kOperator, ToValues(std::move(call)), std::move(options));
}

}  // namespace Atoll::rpc
