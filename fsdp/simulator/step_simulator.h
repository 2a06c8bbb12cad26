// Runs the schedule of a training step against a clock: what one rank computes,
// what it waits for, and what it has in memory. All ranks do the same at the
// same time.
#ifndef FSDP_SIMULATOR_STEP_SIMULATOR_H_
#define FSDP_SIMULATOR_STEP_SIMULATOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/simulator/cost_model.h"
#include "fsdp/simulator/model_shape.h"
#include "fsdp/simulator/sharding.h"
#include "fsdp/simulator/timeline.h"

namespace fsdp::simulator {

struct StepOptions {
  ScheduleOptions schedule;
  // Backwards and optimizer state of a step.
  MemoryPlanOptions memory;
};

// Of a unit or a whole step, on one rank; seconds.
struct Spent {
  double compute = 0;
  double copies = 0;
  double optimizer = 0;
  double gather = 0;  // of communication
  double reduce = 0;  // the same, over replicas, too
  // Waiting for these.
  double exposed_gather = 0;
  double exposed_reduce = 0;
  // Bytes that the rank sends.
  int64_t gathered_bytes = 0;
  int64_t reduced_bytes = 0;
  int64_t replicated_bytes = 0;

  double exposed() const { return exposed_gather + exposed_reduce; }
  int64_t bytes() const {
    return gathered_bytes + reduced_bytes + replicated_bytes;
  }
  void Add(const Spent& other);
};

struct StepResult {
  double seconds = 0;  // compute, copies, optimizer and exposed, together
  Spent total;
  std::vector<Spent> units;
  MemoryPlan peak;  // bytes alive at most, of each kind
  std::vector<Span> timeline;
};

// The second step of a training: the first records the order that later ones
// prefetch by. `sharded` is of `model`. InvalidArgument: numbers below 1 in
// `options`, or a negative optimizer state.
absl::StatusOr<StepResult> SimulateStep(const ModelShape& model,
                                        const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options);

}  // namespace fsdp::simulator

#endif  // FSDP_SIMULATOR_STEP_SIMULATOR_H_
