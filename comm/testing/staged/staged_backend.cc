#include "comm/testing/staged/staged_backend.h"

#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/startup/rank_device.h"
#include "comm/testing/staged/staged_communicator.h"

namespace fsdp::comm {

ConnectDevice StagedBackend(c10::Device device) {
  return [device](const DeviceMeeting& meeting)
             -> absl::StatusOr<std::unique_ptr<Communicator>> {
    c10::Device own = device;
    if (!own.has_index()) {
      FSDP_ASSIGN_OR_RETURN(own,
                            DeviceOfRank(device.type(), meeting.local_rank));
    }
    FSDP_ASSIGN_OR_RETURN(auto host,
                          meeting.host.Split(/*color=*/0, meeting.host.rank()));
    return CreateStagedCommunicator(std::move(host), own);
  };
}

}  // namespace fsdp::comm
