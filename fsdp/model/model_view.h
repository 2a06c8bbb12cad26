// What a sharded model is made of, to be described and planned for: values that
// can be read and change nothing.
#ifndef FSDP_MODEL_MODEL_VIEW_H_
#define FSDP_MODEL_MODEL_VIEW_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

struct FlatView {
  const flat_param::FlatParameter* flat;  // of the model
  c10::ScalarType reduce_dtype;
  c10::ScalarType gradient_dtype;  // of the shard's
  bool gradient_is_placed;         // in memory that the model was given
  // Of what is trained now; 0: nothing.
  int64_t reduce_buffer_bytes;
  int64_t shard_gradient_bytes;
  // Autograd's gradients become those of the shard without a buffer.
  bool takes_gradients;
  // All ranks compute with one copy, in which their shards may rest, too.
  bool is_shared;
  bool shares_shards;
};

struct UnitView {
  std::string name;
  ShardingStrategy strategy;
  int parent;  // -1: none, the root
  bool recomputed;
  bool synchronizes;  // as SetUnitSynchronizes() has it
  bool all_reduces;   // as SetUnitAllReduces() has it
  int ranks;          // that it is sharded over
  int part_ranks;  // that gather for backward; 0: all that it is sharded over
  // Of what is gathered and reduced in training.
  std::optional<comm::QuantizationOptions> quantization;
  int64_t reduce_buffer_bytes;  // of all flat parameters
  std::vector<FlatView> flats;
};

// Parents before children, the root first. As of now: a step, or what is frozen
// between steps, changes the model and not the view.
struct ModelView {
  std::vector<UnitView> units;
  // What the schedule was made of.
  std::vector<ScheduledUnit> scheduled_units;
  ScheduleOptions schedule_options;
};

// Valid as long as `model`.
ModelView ViewOf(const ShardedModel& model);

}  // namespace fsdp

#endif  // FSDP_MODEL_MODEL_VIEW_H_
