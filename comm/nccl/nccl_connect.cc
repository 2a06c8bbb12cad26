#include "comm/nccl/nccl_connect.h"

#include <c10/core/DeviceGuard.h>
#include <nccl.h>

#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/group/connect_together.h"
#include "comm/nccl/nccl_handle.h"

namespace fsdp::comm {
namespace {

// Rank 0 makes the id of the group, the others read it in the store.
absl::StatusOr<ncclUniqueId> ShareId(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    absl::Time deadline) {
  ncclUniqueId id;
  absl::Status made;
  std::string own;
  if (rank == 0) {
    made = NcclToStatus(ncclGetUniqueId(&id), "make the id of an NCCL group",
                        ncclGetLastError(nullptr));
    if (made.ok()) own.assign(id.internal, sizeof(id.internal));
  }
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> shared,
                        ExchangeByStore(store, "nccl_id", rank,
                                        RankNames(world_size), own, deadline));
  FSDP_RETURN_IF_ERROR(made);
  if (shared[0].size() != sizeof(id.internal)) {
    return absl::UnavailableError(
        "rank 0 could not make the id of the group; its own error says why");
  }
  std::memcpy(id.internal, shared[0].data(), sizeof(id.internal));
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclHandle>> ConnectNccl(
    const c10::intrusive_ptr<c10d::Store>& store, c10::Device device, int rank,
    int world_size, absl::Time deadline) {
  FSDP_ASSIGN_OR_RETURN(const ncclUniqueId id,
                        ShareId(store, rank, world_size, deadline));
  absl::StatusOr<std::unique_ptr<NcclHandle>> handle;
  FSDP_RETURN_IF_ERROR(TorchToStatus("use a GPU", [&] {
    const c10::DeviceGuard guard(device);
    handle = NcclHandle::Connect(id, rank, world_size, deadline);
  }));
  return handle;
}

absl::StatusOr<WindowOutcome> AgreeOnWindow(const WindowSteps& steps) {
  FSDP_ASSIGN_OR_RETURN(const bool is_allocated,
                        steps.true_on_all(steps.allocate().ok()));
  if (!is_allocated) return WindowOutcome::kNoMemory;
  absl::Status registered = steps.register_window();
  // The other ranks may still be in register_window().
  if (absl::IsAborted(registered) || absl::IsDeadlineExceeded(registered)) {
    return registered;
  }
  FSDP_ASSIGN_OR_RETURN(const bool is_registered,
                        steps.true_on_all(registered.ok()));
  return is_registered ? WindowOutcome::kWindow : WindowOutcome::kRefused;
}

}  // namespace fsdp::comm
