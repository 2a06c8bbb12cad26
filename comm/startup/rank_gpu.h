// Which GPU of a host a rank of a backend over CUDA computes on.
#ifndef COMM_STARTUP_RANK_GPU_H_
#define COMM_STARTUP_RANK_GPU_H_

#include <c10/core/Device.h>

#include <optional>

#include "absl/status/statusor.h"

namespace fsdp::comm {

// GPU `index`, by default the calling thread's current one. FailedPrecondition:
// there is no GPU or driver; InvalidArgument: there is no such GPU.
absl::StatusOr<c10::Device> FindGpu(std::optional<int> index);

// The index of the GPU of a host's rank `local_rank`: `index`, by default
// that of the rank, modulo their number. It becomes the calling thread's
// current one, for LibTorch goes back to the current one and would set up
// another. FailedPrecondition: there is none.
absl::StatusOr<int> TakeGpu(std::optional<int> index, int local_rank);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_RANK_GPU_H_
