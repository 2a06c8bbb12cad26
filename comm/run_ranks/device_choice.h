// The device that a rank computes on, and how its tensors reach other ranks.
#ifndef COMM_RUN_RANKS_DEVICE_CHOICE_H_
#define COMM_RUN_RANKS_DEVICE_CHOICE_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/device_backend.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {

enum class DeviceBackend {
  kAuto,    // kStaged where ranks of this host share a device, else kNccl
  kNccl,    // from device to device
  kStaged,  // by way of the host's memory
};

// As a flag: auto, nccl or staged.
std::string AbslUnparseFlag(DeviceBackend backend);
bool AbslParseFlag(absl::string_view text, DeviceBackend* backend,
                   std::string* error);

struct DeviceChoice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  ConnectDevice connect;  // for ConnectOptions::device; empty on the CPU
};

// NCCL between ranks of which this one has the GPU, as NcclBackend() of
// comm/nccl/nccl_backend.h makes it; empty in a program that is linked without.
using NcclOn = std::function<ConnectDevice(c10::Device gpu)>;

// To be called by a rank, not by a process that starts ranks: it asks the
// device's runtime. FailedPrecondition: there is no such device, or this
// program lacks what it takes.
absl::StatusOr<DeviceChoice> ChooseDevice(c10::DeviceType type,
                                          DeviceBackend backend,
                                          const Environment& environment,
                                          const NcclOn& nccl_on);

// The same for a program that calls RunRanks() with `ranks`: the device of this
// process where it is a rank, and the CPU where it only starts ranks.
absl::StatusOr<DeviceChoice> ChooseDeviceOfProcess(c10::DeviceType type,
                                                   DeviceBackend backend,
                                                   int ranks,
                                                   const NcclOn& nccl_on);

}  // namespace fsdp::comm

#endif  // COMM_RUN_RANKS_DEVICE_CHOICE_H_
