// Device memory that NCCL reaches without copies.
#ifndef COMM_NCCL_NCCL_MEMORY_H_
#define COMM_NCCL_NCCL_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/nccl/nccl_group.h"

namespace fsdp::comm {

// Whether the NCCL that this process runs with has windows (2.27), and whether
// ncclCommAbort() ends the kernels of symmetric ones (2.29.7): its source's
// barriers look at the flag of an abort since then.
bool HasNcclWindows();
bool HasAbortableNcclWindows();

// Memory of ncclMemAlloc(), freed with the last reference to it: that waits for
// the device, up to the group's timeout, and a few seconds where the group has
// failed. Memory that is in use for longer is never freed.
class NcclMemory {
 public:
  // `bytes` > 0, on the group's device.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> Allocate(
      std::shared_ptr<NcclGroup> group, int64_t bytes);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  // Makes it a window of the group, symmetric or not, the same on all ranks. A
  // collective call: all ranks have HasNcclWindows(). Where the machine has
  // nothing to gain from windows, this does nothing. What NCCL refuses does no
  // harm to the group; Aborted and DeadlineExceeded as NcclHandle::Call().
  absl::Status Register(bool is_symmetric);

  // All of it as uint8; keeps `memory` alive.
  static at::Tensor AsTensor(const std::shared_ptr<NcclMemory>& memory);

 private:
  NcclMemory(std::shared_ptr<NcclGroup> group, void* data, int64_t bytes);

  const std::shared_ptr<NcclGroup> group_;
  void* const data_;
  const int64_t bytes_;
  // NCCL writes to it as long as a registration is in progress.
  const std::shared_ptr<ncclWindow_t> window_;
};

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_MEMORY_H_
