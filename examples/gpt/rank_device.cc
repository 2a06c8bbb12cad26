#include "examples/gpt/rank_device.h"

#include "base/status_macros.h"
#include "comm/rank_device.h"
#include "comm/staged_backend.h"
#include "examples/gpt/nccl_link.h"

namespace gpt {

absl::StatusOr<RankDevice> FindRankDevice(
    c10::DeviceType type, DeviceBackend backend,
    const fsdp::comm::Environment& environment) {
  RankDevice found;
  FSDP_ASSIGN_OR_RETURN(const int count, fsdp::comm::CountDevices(type));
  FSDP_ASSIGN_OR_RETURN(found.device,
                        fsdp::comm::DeviceOfRank(type, environment.local_rank));
  if (type == c10::DeviceType::CPU) return found;
  const bool is_staged =
      backend == DeviceBackend::kStaged ||
      (backend == DeviceBackend::kAuto && environment.local_world_size > count);
  if (is_staged) {
    found.connect = fsdp::comm::StagedBackend(found.device);
  } else {
    FSDP_ASSIGN_OR_RETURN(found.connect, NcclOn(found.device));
  }
  return found;
}

}  // namespace gpt
