#include "comm/nccl_backend.h"
#include "comm/nccl_communicator.h"
#include "examples/gpt/nccl_link.h"

namespace gpt {

absl::StatusOr<fsdp::comm::ConnectDevice> NcclOn(c10::Device device) {
  fsdp::comm::NcclOptions options;
  options.device = device.index();
  return fsdp::comm::NcclBackend(options);
}

}  // namespace gpt
