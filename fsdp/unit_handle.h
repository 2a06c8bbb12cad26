// Ties a module to the unit it has become.
#ifndef FSDP_UNIT_HANDLE_H_
#define FSDP_UNIT_HANDLE_H_

#include <torch/nn/module.h>

#include <memory>
#include <ostream>
#include <utility>

#include "fsdp/sharded_model.h"

namespace fsdp {

// Child of every module that is a unit, so that the unit lives as long as the
// module and is found without a table on the side. Holds no parameters and is
// left out of saved models.
class UnitHandle final : public torch::nn::Module {
 public:
  UnitHandle(std::shared_ptr<ShardedModel> model, int unit)
      : torch::nn::Module("fsdp::Unit"),
        model_(std::move(model)),
        unit_(unit) {}

  const std::shared_ptr<ShardedModel>& model() const { return model_; }
  int unit() const { return unit_; }

  bool is_serializable() const override { return false; }
  void pretty_print(std::ostream& stream) const override {
    stream << "fsdp::Unit(" << model_->unit_name(unit_) << ")";
  }

 private:
  const std::shared_ptr<ShardedModel> model_;
  const int unit_;
};

inline constexpr char kUnitHandleName[] = "_fsdp_unit";

// The handle of `module`, or null when it is not a unit.
std::shared_ptr<UnitHandle> FindUnit(const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_UNIT_HANDLE_H_
