// Everything that a simulated step depends on, together.
#ifndef FSDP_SIMULATOR_SCENARIO_H_
#define FSDP_SIMULATOR_SCENARIO_H_

#include "absl/status/statusor.h"
#include "fsdp/simulator/cost_model.h"
#include "fsdp/simulator/model_shape.h"
#include "fsdp/simulator/sharding.h"
#include "fsdp/simulator/step_simulator.h"

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

#endif  // FSDP_SIMULATOR_SCENARIO_H_
