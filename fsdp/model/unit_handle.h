// Finds the unit that a module has become.
#ifndef FSDP_MODEL_UNIT_HANDLE_H_
#define FSDP_MODEL_UNIT_HANDLE_H_

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <utility>

#include "fsdp/model/sharded_model.h"

namespace fsdp {

// A unit of a model, which lives as long as this.
class UnitHandle {
 public:
  UnitHandle(std::shared_ptr<ShardedModel> model, int unit)
      : model_(std::move(model)), unit_(unit) {}

  const std::shared_ptr<ShardedModel>& model() const { return model_; }
  int unit() const { return unit_; }

 private:
  std::shared_ptr<ShardedModel> model_;
  int unit_;
};

// The unit that `module` is; nothing when it is none, or its model is gone. The
// module itself is as its user has made it: the way to the model is its first
// parameter, or that of a module inside it, which knows its owner. Constant
// time for modules of a sharded model; thread-safe.
std::optional<UnitHandle> FindUnit(const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_MODEL_UNIT_HANDLE_H_
