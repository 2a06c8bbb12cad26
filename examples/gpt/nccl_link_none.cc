#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "examples/gpt/nccl_link.h"

namespace gpt {

absl::StatusOr<fsdp::comm::ConnectDevice> NcclOn(c10::Device device) {
  return absl::FailedPreconditionError(absl::StrCat(
      "nccl on ", device.str(),
      ": this program was built without it; build with --config=cuda, or use "
      "--device-backend=staged"));
}

}  // namespace gpt
