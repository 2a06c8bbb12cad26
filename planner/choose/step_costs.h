// What the parts of a step cost on the machine that it runs on, beside what the
// model computes.
#ifndef PLANNER_CHOOSE_STEP_COSTS_H_
#define PLANNER_CHOOSE_STEP_COSTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// Of one rank while all do the same. Rates are positive, in bytes per second,
// and may be infinite; times are not negative, in seconds.
struct StepCosts {
  double memory_bandwidth = 0;  // read plus written: a copy of n bytes is 2n
  // An all-gather, or reduce-scatter, of n bytes on w ranks takes
  // latency + n (w - 1) / w / bandwidth. Where ranks share memory, gathers take
  // the latency alone.
  double latency = 0;
  double gather_bandwidth = 0;
  double reduce_bandwidth = 0;
  bool overlaps = false;  // collectives run beside what a rank computes
  // From and to Tier::kCpu, of a model on a device, and Tier::kSsd.
  double host_bandwidth = 0;
  double ssd_bandwidth = 0;

  // InvalidArgument: a rate that is not positive, or a negative time.
  absl::Status Validate() const;
};

// Exact, for other ranks. InvalidArgument: another text.
std::string ToText(const StepCosts& costs);
absl::StatusOr<StepCosts> CostsFromText(absl::string_view text);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_STEP_COSTS_H_
