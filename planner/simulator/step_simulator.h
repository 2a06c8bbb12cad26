// Runs the schedule of a training step against a clock: what one rank computes,
// what it waits for, and what it has in memory. All ranks do the same at the
// same time.
#ifndef PLANNER_SIMULATOR_STEP_SIMULATOR_H_
#define PLANNER_SIMULATOR_STEP_SIMULATOR_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/schedule/schedule.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"

namespace fsdp::simulator {

struct StepOptions {
  ScheduleOptions schedule;
  // Backwards and optimizer state of a step.
  MemoryPlanOptions memory;
};

// Seconds and bytes of a step on one rank.
struct Spent {
  double compute = 0;
  double copies = 0;
  double optimizer = 0;
  // The time that compute waits for gathers, and for reductions, those over
  // copies included.
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
};

struct StepResult {
  int ranks = 1;
  int copies = 1;      // of the model: all ranks over those that share a copy
  double seconds = 0;  // compute, copies, optimizer and exposed together
  Spent total;
  MemoryPlan peak;  // the most bytes alive, of each kind
};

// Simulates the second step of a training: the first one records the order by
// which later ones prefetch. InvalidArgument: a number in `options` is too
// small, or the optimizer state is negative.
absl::StatusOr<StepResult> SimulateStep(const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options);

// Everything on which a simulated step depends.

struct Scenario {
  ModelShape model;
  ShardingOptions sharding;
  CostOptions costs;
  StepOptions step;
};

// InvalidArgument: one of the parts is refused.
absl::StatusOr<StepResult> Simulate(const Scenario& scenario);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_STEP_SIMULATOR_H_
