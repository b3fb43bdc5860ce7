#include "atoll/client/gradient_hook.h"

#include <memory>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace Atoll::client {
namespace {

class Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Hook(OnGradient on_gradient) : on_gradient_(std::move(on_gradient)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    if (parameter.grad().defined()) on_gradient_();
  }

 private:
  OnGradient on_gradient_;
};

}  // namespace

absl::Status InstallGradientHook(const at::Tensor& parameter, OnGradient on_gradient) {
  auto& present = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (present != nullptr) {
    const bool ours = dynamic_cast<Hook*>(present.get()) != nullptr;
    return absl::FailedPreconditionError(
        ours ? "it is attached to another trainer already"
             : "it has a post-accumulate-grad hook already, and may have one");
  }
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(std::move(on_gradient)));
  return absl::OkStatus();
}

void RemoveGradientHook(const at::Tensor& parameter) {
  torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
}

void AtEndOfBackward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

at::Tensor TakeGradient(const at::Tensor& parameter) {
  return std::exchange(parameter.mutable_grad(), at::Tensor());
}

}  // namespace Atoll::client
