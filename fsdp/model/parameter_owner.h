// What a sharded model leaves at the parameters of its module: whose they are,
// and that their gradients are elsewhere.
//
// It hangs on LibTorch's autograd metadata of the tensor, which stays when the
// tensor's data is replaced.
#ifndef FSDP_MODEL_PARAMETER_OWNER_H_
#define FSDP_MODEL_PARAMETER_OWNER_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <utility>

namespace fsdp {

class ShardedModel;

// One for all parameters of a model, which may outlive it. Thread-safe once the
// model is set.
class ParameterOwner {
 public:
  void set_model(std::weak_ptr<ShardedModel> model) {
    model_ = std::move(model);
  }
  // Null when it is gone.
  std::shared_ptr<ShardedModel> model() const { return model_.lock(); }

  // Between these the parameters' own gradients may be used as those of any
  // tensor. May be nested.
  void OpenGradients() { ++opened_; }
  void CloseGradients() { --opened_; }
  bool gradients_are_open() const { return opened_ > 0; }

 private:
  std::weak_ptr<ShardedModel> model_;
  std::atomic<int> opened_{0};
};

// Gives `parameter`, a tensor of a module, to `owner`. From then on grad() and
// mutable_grad() of it throw StatusError (FailedPrecondition) that names the
// parameter as `name` and says where its gradient is, unless gradients are open
// or it is frozen. Everything else about it stays as it is.
void SetOwner(const at::Tensor& parameter, const std::string& name,
              std::shared_ptr<const ParameterOwner> owner);

// Null where no model owns `parameter`. Costs a few nanoseconds.
const ParameterOwner* OwnerOf(const at::Tensor& parameter);

}  // namespace fsdp

#endif  // FSDP_MODEL_PARAMETER_OWNER_H_
