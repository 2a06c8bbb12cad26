// Describes a model that is not sharded yet to the memory plan and the
// simulator: what FullyShard() would make of it, to the byte.
#ifndef PLANNER_CHOOSE_PLANNED_MODEL_H_
#define PLANNER_CHOOSE_PLANNED_MODEL_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/memory/memory_plan.h"
#include "fsdp/options/options.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/simulator/simulator.h"

namespace fsdp {

struct PlannedModel {
  // With the groups of ranks of the first unit.
  simulator::ShardedShape shape;
  ScheduleOptions schedule;
  std::optional<OffloadPlan> offload;
  // Bytes of gradients that autograd makes, by the (first) module that has the
  // parameter; 0 if they become the shard's own.
  std::vector<int64_t> gradients;

  MemoryPlan PlanMemory(const MemoryPlanOptions& options) const;
};

// `plan` is that of `mesh` and `options`, which quantize nothing. Calls no
// collective. Errors are those of PlanOffload().
absl::StatusOr<PlannedModel> PlanModel(const ShardPlan& plan,
                                       const comm::Mesh& mesh,
                                       const Options& options);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_PLANNED_MODEL_H_
