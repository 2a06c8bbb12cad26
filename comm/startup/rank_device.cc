#include "comm/startup/rank_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp::comm {

absl::StatusOr<int> CountDevices(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return 1;
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    return absl::FailedPreconditionError(
        absl::StrCat("this program was built without support for ", name,
                     " devices; for GPUs build with --config=cuda and link "
                     "//third_party/libtorch:cuda"));
  }
  const c10::DeviceIndex count =
      c10::impl::getDeviceGuardImpl(type)->deviceCount();
  if (count > 0) return count;
  return absl::FailedPreconditionError(
      absl::StrCat("this process sees 0 ", name,
                   " devices; is there one, does its driver run, and does "
                   "CUDA_VISIBLE_DEVICES, where it is set, name it?"));
}

absl::StatusOr<c10::Device> DeviceOfRank(c10::DeviceType type, int local_rank) {
  FSDP_ASSIGN_OR_RETURN(const int count, CountDevices(type));
  if (type == c10::DeviceType::CPU) return c10::Device(type);
  return c10::Device(type, static_cast<c10::DeviceIndex>(local_rank % count));
}

}  // namespace fsdp::comm
