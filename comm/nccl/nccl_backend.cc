#include "comm/nccl/nccl_backend.h"

#include <memory>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_connect.h"

namespace fsdp::comm {

ConnectDevice NcclBackend(const NcclOptions& options) {
  return [options](const DeviceMeeting& meeting)
             -> absl::StatusOr<std::unique_ptr<Communicator>> {
    NcclOptions own = options;
    own.timeout = meeting.timeout;
    FSDP_ASSIGN_OR_RETURN(own.device,
                          TakeGpu(own.device, meeting.environment.local_rank));
    return CreateNcclCommunicator(meeting.store, meeting.environment.rank,
                                  meeting.environment.world_size, own);
  };
}

}  // namespace fsdp::comm
