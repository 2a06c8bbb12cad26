#include "examples/gpt/flags/device_choice.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/staged/staged_backend.h"
#include "comm/startup/rank_device.h"

namespace gpt {

absl::StatusOr<DeviceChoice> ChooseDevice(
    c10::DeviceType type, DeviceBackend backend,
    const fsdp::comm::Environment& environment, const NcclOn& nccl_on) {
  DeviceChoice found;
  FSDP_ASSIGN_OR_RETURN(const int count, fsdp::comm::CountDevices(type));
  FSDP_ASSIGN_OR_RETURN(found.device,
                        fsdp::comm::DeviceOfRank(type, environment.local_rank));
  if (type == c10::DeviceType::CPU) return found;
  const bool is_staged =
      backend == DeviceBackend::kStaged ||
      (backend == DeviceBackend::kAuto && environment.local_world_size > count);
  if (is_staged) {
    found.connect = fsdp::comm::StagedBackend(found.device);
  } else if (nccl_on) {
    found.connect = nccl_on(found.device);
  } else {
    return absl::FailedPreconditionError(absl::StrCat(
        "nccl on ", found.device.str(),
        ": this program was linked without it; run //examples/gpt:train_cuda, "
        "built with --config=cuda, or use --device-backend=staged"));
  }
  return found;
}

}  // namespace gpt
