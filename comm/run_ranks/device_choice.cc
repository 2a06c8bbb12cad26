#include "comm/run_ranks/device_choice.h"

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "comm/staged/staged_backend.h"
#include "comm/startup/environment.h"
#include "comm/startup/rank_device.h"

namespace fsdp::comm {

std::string AbslUnparseFlag(DeviceBackend backend) {
  switch (backend) {
    case DeviceBackend::kAuto:
      return "auto";
    case DeviceBackend::kNccl:
      return "nccl";
    case DeviceBackend::kStaged:
      return "staged";
  }
  return "?";
}

bool AbslParseFlag(absl::string_view text, DeviceBackend* backend,
                   std::string* error) {
  for (const DeviceBackend each :
       {DeviceBackend::kAuto, DeviceBackend::kNccl, DeviceBackend::kStaged}) {
    if (text != AbslUnparseFlag(each)) continue;
    *backend = each;
    return true;
  }
  *error = "expected auto, nccl or staged";
  return false;
}

absl::StatusOr<DeviceChoice> ChooseDevice(c10::DeviceType type,
                                          DeviceBackend backend,
                                          const Environment& environment,
                                          const NcclOn& nccl_on) {
  DeviceChoice found;
  FSDP_ASSIGN_OR_RETURN(const int count, CountDevices(type));
  FSDP_ASSIGN_OR_RETURN(found.device,
                        DeviceOfRank(type, environment.local_rank));
  if (type == c10::DeviceType::CPU) return found;
  const bool is_staged =
      backend == DeviceBackend::kStaged ||
      (backend == DeviceBackend::kAuto && environment.local_world_size > count);
  if (is_staged) {
    found.connect = StagedBackend(found.device);
  } else if (nccl_on) {
    found.connect = nccl_on(found.device);
  } else {
    return absl::FailedPreconditionError(absl::StrCat(
        "nccl on ", found.device.str(),
        ": this program was linked without NCCL: build it with --config=cuda, "
        "as a program that is linked with it (train_cuda of the examples)"));
  }
  return found;
}

absl::StatusOr<DeviceChoice> ChooseDeviceOfProcess(c10::DeviceType type,
                                                   DeviceBackend backend,
                                                   int ranks,
                                                   const NcclOn& nccl_on) {
  FSDP_ASSIGN_OR_RETURN(const Environment environment,
                        ReadEnvironment(std::getenv));
  const bool is_rank =
      environment.started_by != StartedBy::kNobody || ranks == 1;
  return ChooseDevice(is_rank ? type : c10::DeviceType::CPU, backend,
                      environment, nccl_on);
}

}  // namespace fsdp::comm
