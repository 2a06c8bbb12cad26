// Measures StepCosts by copies and collectives, in about a second.
#ifndef PLANNER_CHOOSE_MEASURED_COSTS_H_
#define PLANNER_CHOOSE_MEASURED_COSTS_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "planner/choose/step_costs.h"

namespace fsdp {

// Returns rank 0's numbers on all ranks. Collective. Collectives are measured
// with `bytes`, the size of a unit. `directory` is one of an SSD; empty: none.
// Errors are those of Work::Wait(), what LibTorch throws, and what the system
// says of the directory.
absl::StatusOr<StepCosts> MeasureCosts(comm::Communicator& ranks,
                                       c10::Device device, int64_t bytes,
                                       const std::string& directory,
                                       absl::Duration timeout);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_MEASURED_COSTS_H_
