// Device memory that NCCL reaches without copies.
#ifndef COMM_NCCL_MEMORY_H_
#define COMM_NCCL_MEMORY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/nccl_group.h"

namespace fsdp::comm {

// Whether the NCCL that this process runs with has symmetric windows (2.27).
bool HasNcclWindows();

// Memory of ncclMemAlloc(), freed with the last reference to it.
class NcclMemory {
 public:
  // `bytes` > 0, on the group's device.
  static absl::StatusOr<std::shared_ptr<NcclMemory>> Allocate(
      std::shared_ptr<NcclGroup> group, int64_t bytes);
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  // Makes it a symmetric window of the group. A collective call: all ranks have
  // HasNcclWindows(). Where the machine has nothing to gain from windows, this
  // does nothing.
  absl::Status Register();

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

#endif  // COMM_NCCL_MEMORY_H_
