#include "comm/nccl_backend.h"

#include <cuda_runtime_api.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/cuda_status.h"
#include "base/status_macros.h"
#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/nccl_communicator.h"

namespace fsdp::comm {
namespace {

absl::StatusOr<int> GpuOf(int local_rank) {
  int num_gpus = 0;
  FSDP_RETURN_IF_ERROR(
      CudaToStatus(cudaGetDeviceCount(&num_gpus), "look for a GPU"));
  if (num_gpus == 0) {
    return absl::FailedPreconditionError(
        "this process sees no GPU; see CUDA_VISIBLE_DEVICES");
  }
  return local_rank % num_gpus;
}

}  // namespace

ConnectDevice NcclBackend(const NcclOptions& options) {
  return [options](const DeviceMeeting& meeting)
             -> absl::StatusOr<std::unique_ptr<Communicator>> {
    NcclOptions own = options;
    own.timeout = meeting.timeout;
    if (own.device < 0) {
      FSDP_ASSIGN_OR_RETURN(own.device, GpuOf(meeting.environment.local_rank));
    }
    FSDP_RETURN_IF_ERROR(CudaToStatus(
        cudaSetDevice(own.device),
        absl::StrCat("make GPU ", own.device, " the current one")));
    return CreateNcclCommunicator(meeting.store, meeting.environment.rank,
                                  meeting.environment.world_size, own);
  };
}

}  // namespace fsdp::comm
