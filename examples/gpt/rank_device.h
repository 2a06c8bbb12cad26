// The device that a rank computes on, and how its tensors reach other ranks.
#ifndef EXAMPLES_GPT_RANK_DEVICE_H_
#define EXAMPLES_GPT_RANK_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include "absl/status/statusor.h"
#include "comm/bootstrap.h"
#include "comm/environment.h"
#include "examples/gpt/options.h"

namespace gpt {

struct RankDevice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  fsdp::comm::ConnectDevice connect;  // empty on the CPU
};

// FailedPrecondition: there is no such device, or this program was built
// without what it takes.
absl::StatusOr<RankDevice> FindRankDevice(
    c10::DeviceType type, DeviceBackend backend,
    const fsdp::comm::Environment& environment);

}  // namespace gpt

#endif  // EXAMPLES_GPT_RANK_DEVICE_H_
