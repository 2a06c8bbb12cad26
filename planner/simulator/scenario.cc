#include "planner/simulator/scenario.h"

#include "absl/status/statusor.h"
#include "base/status_macros.h"

namespace fsdp::simulator {

absl::StatusOr<StepResult> Simulate(const Scenario& scenario) {
  FSDP_ASSIGN_OR_RETURN(
      const CostModel costs,
      CostModel::Create(scenario.costs, scenario.sharding.ranks));
  FSDP_ASSIGN_OR_RETURN(ShardedShape sharded,
                        Shard(scenario.model, scenario.sharding));
  if (scenario.costs.shared_memory) {
    ShareGathered(costs.RanksOnHost(sharded.shard), sharded);
  }
  return SimulateStep(scenario.model, sharded, costs, scenario.step);
}

}  // namespace fsdp::simulator
