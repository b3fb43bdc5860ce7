#include "atoll/client/parameters.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"

namespace Atoll::client {
namespace {

absl::Status CheckOne(const std::string& name, const at::Tensor& tensor) {
  auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("parameter '", name, "' ", what));
  };
  if (!tensor.defined()) return wrong("is undefined");
  if (tensor.layout() != at::kStrided) return wrong("is not dense");
  if (!tensor.device().is_cpu()) return wrong(absl::StrCat("is on ", tensor.device().str(), ", not the CPU"));
  if (tensor.scalar_type() != at::kFloat) {
    return wrong(absl::StrCat("is of ", c10::toString(tensor.scalar_type()), ", not Float"));
  }
  if (!tensor.is_leaf()) return wrong("is computed from others: only leaves are trained");
  if (!tensor.requires_grad()) return wrong("does not require grad: leave it out");
  return absl::OkStatus();
}

// Whether elements lie alike in both; a dimension of one element has no stride that matters.
bool SameOrder(const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() != b.dim()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) != b.size(i) || (a.size(i) > 1 && a.stride(i) != b.stride(i))) return false;
  }
  return true;
}

at::Tensor MemoryOf(const at::Tensor& dense) {
  return at::as_strided(dense.detach(), {dense.numel()}, {1}, dense.storage_offset());
}

struct Range {
  const char* begin;
  const char* end;
  int parameter;
};

}  // namespace

absl::StatusOr<ParameterSet> ParameterSet::Create(const NamedTensors& named) {
  ParameterSet set;
  absl::flat_hash_set<const c10::TensorImpl*> seen;
  std::vector<Range> ranges;
  for (const auto& [name, tensor] : named.items()) {
    ATOLL_RETURN_IF_ERROR(CheckOne(name, tensor));
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;  // Tied: trained once.
    if (!tensor.is_non_overlapping_and_dense()) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter '", name, "' has strides that overlap or leave holes"));
    }
    const int index = set.count();
    set.tensors_.push_back(tensor);
    set.flat_.push_back(MemoryOf(tensor));
    set.specs_.push_back({name, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.numel() > 0) ranges.push_back({begin, begin + tensor.nbytes(), index});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      return absl::InvalidArgumentError(absl::StrCat("parameters '", set.name(ranges[i - 1].parameter),
                                                     "' and '", set.name(ranges[i].parameter),
                                                     "' share memory: attach what they are views of"));
    }
  }
  if (ranges.empty()) return absl::InvalidArgumentError("there are no parameters to train");
  return set;
}

at::Tensor ParameterSet::Slice(int parameter, int64_t begin, int64_t end) const {
  return flat_[parameter].narrow(0, begin, end - begin);
}

absl::StatusOr<at::Tensor> ParameterSet::Flatten(int parameter, const at::Tensor& gradient) const {
  if (!InPlace(parameter)) return Exchanged(parameter);
  const at::Tensor& own = tensors_[parameter];
  auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("the gradient of '", name(parameter), "' ", what));
  };
  if (!gradient.device().is_cpu()) return wrong("is not on the CPU");
  if (gradient.scalar_type() != own.scalar_type()) return wrong("is not of the parameter's dtype");
  if (gradient.sizes() != own.sizes()) return wrong("is not of the parameter's shape");
  try {
    at::Tensor dense = gradient.detach();
    if (dense.layout() != at::kStrided) dense = dense.to_dense();
    if (SameOrder(dense, own)) return MemoryOf(dense);
    at::Tensor reordered = at::empty_strided(own.sizes(), own.strides(), dense.options());
    reordered.copy_(dense);
    return MemoryOf(reordered);
  } catch (...) {
    return absl::InternalError(
        absl::StrCat("the gradient of '", name(parameter), "': ", rpc::ExceptionText()));
  }
}

bool ParameterSet::InPlace(int parameter) const {
  return tensors_[parameter].const_data_ptr() == flat_[parameter].const_data_ptr() &&
         tensors_[parameter].numel() == flat_[parameter].numel();
}

absl::Status ParameterSet::Exchanged(int parameter) const {
  return absl::FailedPreconditionError(absl::StrCat("the memory of parameter '", name(parameter),
                                                    "' was exchanged after the model was attached"));
}

absl::Status ParameterSet::CheckInPlace() const {
  for (int i = 0; i < count(); ++i) {
    if (!InPlace(i)) return Exchanged(i);
  }
  return absl::OkStatus();
}

void ParameterSet::BumpVersions() const {
  for (const at::Tensor& tensor : tensors_) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace Atoll::client
