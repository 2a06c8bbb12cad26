// A sharded model as text for people: members of a sharded module.
#ifndef FSDP_DESCRIBE_DESCRIBE_H_
#define FSDP_DESCRIBE_DESCRIBE_H_

#include <string>

#include "fsdp/describe/memory_plan.h"

namespace fsdp {

class ShardedModel;

// The memory that this rank will need.
MemoryPlan PlanMemory(const ShardedModel& model,
                      const MemoryPlanOptions& options = MemoryPlanOptions());

// The units as an indented tree: strategy, parameters, dtypes they are stored,
// computed and reduced in, whole and sharded sizes; then the memory plan.
std::string Describe(const ShardedModel& model);

}  // namespace fsdp

#endif  // FSDP_DESCRIBE_DESCRIBE_H_
