// Everything that a simulated step depends on, together.
#ifndef TOOLS_SIMULATOR_SCENARIO_H_
#define TOOLS_SIMULATOR_SCENARIO_H_

#include "absl/status/statusor.h"
#include "tools/simulator/cost_model.h"
#include "tools/simulator/model_shape.h"
#include "tools/simulator/sharding.h"
#include "tools/simulator/step_simulator.h"

namespace fsdp::simulator {

struct Scenario {
  ModelShape model;
  ShardingOptions sharding;
  CostOptions costs;
  StepOptions step;
};

// InvalidArgument where one of the parts says so.
absl::StatusOr<StepResult> Simulate(const Scenario& scenario);

}  // namespace fsdp::simulator

#endif  // TOOLS_SIMULATOR_SCENARIO_H_
