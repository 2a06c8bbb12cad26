// Whether a device or the host steps faster what rests on the host, found by
// trying.
#ifndef FSDP_RESTING_STEP_RATES_H_
#define FSDP_RESTING_STEP_RATES_H_

#include <c10/core/Device.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "fsdp/options/offload_options.h"
#include "offload/page_memory.h"

namespace fsdp {

// Of one rank, in bytes per second.
struct StepRates {
  double up = 0;         // copies from the host to the device
  double down = 0;       // and back
  double host_step = 0;  // parameters in float32 that the host steps by AdamW

  // "up 51.2 GB/s, down 49.8 GB/s, the host's AdamW 3.1 GB/s of parameters".
  std::string ToString() const;
};

// Takes less than a second, and 64 MiB of `pages` and of the device.
// DeadlineExceeded: the device does not answer.
absl::StatusOr<StepRates> MeasureStepRates(c10::Device device,
                                           offload::PageAllocator& pages,
                                           absl::Time deadline);

// The least of each rate over all ranks. Collective.
absl::StatusOr<StepRates> SlowestStepRates(const StepRates& mine,
                                           comm::Communicator& world,
                                           absl::string_view what,
                                           absl::Time deadline);

// kHost or kDevice: where a step takes less time with all that rests elsewhere
// on its way at the same time, copies up, copies down and computing beside each
// other. What the device itself computes costs nothing; on a tie it steps.
StepOn FasterPlace(const StepRates& rates, const OffloadOptions& options);

}  // namespace fsdp

#endif  // FSDP_RESTING_STEP_RATES_H_
