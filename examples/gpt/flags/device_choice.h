// The device that a rank computes on, and how its tensors reach other ranks.
#ifndef EXAMPLES_GPT_FLAGS_DEVICE_CHOICE_H_
#define EXAMPLES_GPT_FLAGS_DEVICE_CHOICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <functional>

#include "absl/status/statusor.h"
#include "comm/device_backend.h"
#include "comm/startup/environment.h"
#include "examples/gpt/flags/options.h"

namespace gpt {

struct DeviceChoice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  fsdp::comm::ConnectDevice connect;  // empty on the CPU
};

// NCCL between ranks of which this one has the GPU; empty in a program that is
// linked without.
using NcclOn = std::function<fsdp::comm::ConnectDevice(c10::Device gpu)>;

// FailedPrecondition: there is no such device, or this program lacks what it
// takes.
absl::StatusOr<DeviceChoice> ChooseDevice(
    c10::DeviceType type, DeviceBackend backend,
    const fsdp::comm::Environment& environment, const NcclOn& nccl_on);

}  // namespace gpt

#endif  // EXAMPLES_GPT_FLAGS_DEVICE_CHOICE_H_
