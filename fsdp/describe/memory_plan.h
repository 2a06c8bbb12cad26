// Predicts the memory of a rank before the first step, by running the schedule
// without a model. Pure: no tensors.
#ifndef FSDP_DESCRIBE_MEMORY_PLAN_H_
#define FSDP_DESCRIBE_MEMORY_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

struct ScheduledUnit;
struct ScheduleOptions;

// Of one unit on this rank, in bytes.
struct UnitBytes {
  int64_t shard = 0;  // parameters, resting in memory
  int64_t away = 0;   // parameters, resting elsewhere
  // Of both together, parameters without optimizer states in memory: frozen
  // ones, and those whose states rest elsewhere.
  int64_t stateless = 0;
  int64_t gradient = 0;       // of the shard
  int64_t unsharded = 0;      // gathered; 0 where nothing is copied for that
  int64_t copy = 0;           // its part of a copy that all ranks compute with
  int64_t part = 0;           // kept between forward and backward
  int64_t reduce_buffer = 0;  // all gradients of the unit, to be reduced
  int64_t segment = 0;        // of that, this rank's
  // What `unsharded` and `reduce_buffer` consist of where they are several
  // buffers: one for each flat parameter.
  std::vector<int64_t> unsharded_parts = {};
  std::vector<int64_t> reduce_parts = {};
  // Of a gather and of a reduction that are quantised.
  int64_t gather_messages = 0;
  int64_t reduce_messages = 0;
  bool trainable = true;
  // Gradients are the shard's without a reduce buffer, unless they are kept
  // whole first.
  bool takes_gradients = false;
  // In backwards but the last of a step: reduced, not kept whole; and over
  // replicas, too. Where all units have both, these backwards keep all whole.
  bool synchronizes = true;
  bool all_reduces = true;
};

// Bytes of one rank, at most, by kind: of gathered units and reduce buffers
// those of the buffers that hold them, which may be larger (buffer_fit.h).
// Activations, and the gradients autograd holds of the one or two units whose
// backward is under way, are the model's.
struct MemoryPlan {
  int64_t shards = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t copies = 0;
  int64_t gathered = 0;
  int64_t parts = 0;
  int64_t in_flight = 0;  // reduce buffers
  int64_t messages = 0;   // of quantised collectives
  int64_t transfers = 0;  // of offload, buffers

  int64_t total() const {
    return shards + gradients + optimizer + copies + gathered + parts +
           in_flight + messages + transfers;
  }
  // A line for each kind.
  std::string ToString() const;
};

struct MemoryPlanOptions {
  // Bytes of optimizer state per byte of trainable shard: 2 for Adam.
  double optimizer_state = 2;
  // Backwards of which only the last reduces, or only the last all of it, as
  // the units say.
  int backwards_per_step = 1;  // at least 1
};

// `units` as for Schedule, `bytes` of each. Assumes that every unit runs once,
// in the order of the list, inside its parent, and that gradients keep their
// memory from the first backward on, or with step_in_backward one unit at a
// time.
MemoryPlan PlanMemory(const std::vector<ScheduledUnit>& units,
                      const std::vector<UnitBytes>& bytes,
                      const ScheduleOptions& schedule_options,
                      const MemoryPlanOptions& options = MemoryPlanOptions());

}  // namespace fsdp

#endif  // FSDP_DESCRIBE_MEMORY_PLAN_H_
