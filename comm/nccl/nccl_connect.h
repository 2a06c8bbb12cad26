// Connects the ranks of an NCCL group.
#ifndef COMM_NCCL_NCCL_CONNECT_H_
#define COMM_NCCL_NCCL_CONNECT_H_

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/nccl/nccl_handle.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Joins the group of `world_size` ranks that meet in `store`, with a GPU each.
absl::StatusOr<std::unique_ptr<NcclHandle>> ConnectNccl(
    const c10::intrusive_ptr<c10d::Store>& store, c10::Device device, int rank,
    int world_size, absl::Time deadline);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_CONNECT_H_
