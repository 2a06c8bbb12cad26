// A sharded model as values to read, for descriptions and plans. Changing them
// does not change the model.
#ifndef FSDP_MODEL_MODEL_VIEW_H_
#define FSDP_MODEL_MODEL_VIEW_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

struct FlatView {
  const flat_param::FlatParameter* flat = nullptr;  // of the model
  c10::ScalarType reduce_dtype = c10::ScalarType::Undefined;
  // The dtype of the shard's gradient.
  c10::ScalarType gradient_dtype = c10::ScalarType::Undefined;
  bool gradient_is_placed = false;  // in memory that the model was given
  // These count what is trained at the moment; 0: nothing.
  int64_t reduce_buffer_bytes = 0;
  int64_t shard_gradient_bytes = 0;
  // Autograd's gradients become those of the shard without a buffer.
  bool takes_gradients = false;
  // All ranks compute with one copy, in which their shards may rest too.
  bool is_shared = false;
  bool shares_shards = false;
};

struct UnitView {
  std::string name;
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  int parent = -1;  // -1: none, the root
  bool recomputed = false;
  bool synchronizes = true;  // as SetUnitSynchronizes() has it
  bool all_reduces = true;   // as SetUnitAllReduces() has it
  int ranks = 1;             // that it is sharded over
  // Ranks that gather for backward; 0: all that it is sharded over.
  int part_ranks = 0;
  // Applies to what is gathered and reduced in training.
  std::optional<comm::QuantizationOptions> quantization;
  int64_t reduce_buffer_bytes = 0;  // of all flat parameters
  std::vector<FlatView> flats;
};

// Parents come before children, the root first. Later steps, and freezing
// between steps, change the model and not the view.
struct ModelView {
  std::vector<UnitView> units;
  // The arguments that the schedule was made with.
  std::vector<ScheduledUnit> scheduled_units;
  ScheduleOptions schedule_options;
};

// Is valid as long as `model`.
ModelView ViewOf(const ShardedModel& model);

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

// Returns the unit that `module` is; nothing if it is none, or its model is
// gone. The way to the model is the owner of the first parameter of the module,
// or of a module inside it. Constant time for modules of a sharded model;
// thread-safe.
std::optional<UnitHandle> FindUnit(const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_MODEL_MODEL_VIEW_H_
