// A model that is not sharded yet as the memory plan and the simulator see it:
// what FullyShard() would make of it, to the byte, without doing it.
#ifndef PLANNER_CHOOSE_PLANNED_MODEL_H_
#define PLANNER_CHOOSE_PLANNED_MODEL_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/options/options.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/simulator/sharding.h"

namespace fsdp {

struct PlannedModel {
  // With the groups of ranks of the first unit.
  simulator::ShardedShape shape;
  ScheduleOptions schedule;
  std::optional<OffloadPlan> offload;
  // Bytes of gradients that autograd makes, by the module that has the
  // parameter, or the first of several; 0 where they become the shard's own.
  std::vector<int64_t> gradients;

  MemoryPlan PlanMemory(const MemoryPlanOptions& options) const;
};

// `plan` is that of `mesh` and `options`, which quantise nothing. Calls no
// collective. Errors as PlanOffload()'s.
absl::StatusOr<PlannedModel> PlanModel(const ShardPlan& plan,
                                       const comm::Mesh& mesh,
                                       const Options& options);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_PLANNED_MODEL_H_
