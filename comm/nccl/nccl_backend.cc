#include "comm/nccl/nccl_backend.h"

#include <memory>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/device_backend.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/startup/rank_gpu.h"

namespace fsdp::comm {

ConnectDevice NcclBackend(const NcclOptions& options) {
  return [options](const DeviceMeeting& meeting)
             -> absl::StatusOr<std::unique_ptr<Communicator>> {
    NcclOptions own = options;
    own.timeout = meeting.timeout;
    FSDP_ASSIGN_OR_RETURN(own.device, TakeGpu(own.device, meeting.local_rank));
    return CreateNcclCommunicator(meeting.store, meeting.host.rank(),
                                  meeting.host.world_size(), own);
  };
}

}  // namespace fsdp::comm
