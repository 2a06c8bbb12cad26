// The costs of a step on the machine that it runs on, besides the model's
// compute.
#ifndef PLANNER_CHOOSE_STEP_COSTS_H_
#define PLANNER_CHOOSE_STEP_COSTS_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp {

// The costs on one rank while all do the same. Rates are positive, in bytes per
// second, and may be infinite; times are not negative, in seconds.
struct StepCosts {
  double memory_bandwidth = 0;  // read plus written: a copy of n bytes is 2n
  // An all-gather or reduce-scatter of n bytes on w ranks takes
  // latency + n (w - 1) / w / bandwidth. If ranks share memory, an all-gather
  // takes only the latency.
  double latency = 0;
  double gather_bandwidth = 0;
  double reduce_bandwidth = 0;
  bool overlaps = false;  // collectives run beside what a rank computes
  // To and from Tier::kCpu, for a model on a device, and Tier::kSsd.
  double host_bandwidth = 0;
  double ssd_bandwidth = 0;

  // InvalidArgument: a rate is not positive, or a time is negative.
  absl::Status Validate() const;
};

// The costs as text, exactly.
std::string ToText(const StepCosts& costs);

// Measures StepCosts by copies and collectives, in about a second.

// Returns rank 0's numbers on all ranks. Collective. Collectives are measured
// with `bytes`, the size of a unit. `directory` is one of an SSD; empty: none.
// Errors are those of Work::Wait(), what LibTorch throws, and what the system
// says of the directory.
absl::StatusOr<StepCosts> MeasureCosts(comm::Communicator& ranks,
                                       c10::Device device, int64_t bytes,
                                       const std::string& directory,
                                       absl::Duration timeout);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_STEP_COSTS_H_
