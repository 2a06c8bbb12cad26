// Describes a sharded model for people. Users call the members of a sharded
// module with these names.
#ifndef FSDP_DESCRIBE_DESCRIBE_H_
#define FSDP_DESCRIBE_DESCRIBE_H_

#include <string>

#include "fsdp/describe/memory_plan.h"

namespace fsdp {

class ShardedModel;

// Predicts the memory that this rank will need.
MemoryPlan PlanMemory(const ShardedModel& model,
                      const MemoryPlanOptions& options = MemoryPlanOptions());

// Returns an indented tree of units with strategy, parameters, whole and
// sharded sizes, and dtypes of storage, computing and reductions; then the
// memory plan, and what is offloaded.
std::string Describe(const ShardedModel& model);

}  // namespace fsdp

#endif  // FSDP_DESCRIBE_DESCRIBE_H_
