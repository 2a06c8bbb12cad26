// Everything on which a simulated step depends.
#ifndef PLANNER_SIMULATOR_SCENARIO_H_
#define PLANNER_SIMULATOR_SCENARIO_H_

#include "absl/status/statusor.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/sharding.h"
#include "planner/simulator/step_simulator.h"

namespace fsdp::simulator {

struct Scenario {
  ModelShape model;
  ShardingOptions sharding;
  CostOptions costs;
  StepOptions step;
};

// InvalidArgument: one of the parts is refused.
absl::StatusOr<StepResult> Simulate(const Scenario& scenario);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_SCENARIO_H_
