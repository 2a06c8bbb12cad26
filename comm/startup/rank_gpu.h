// Chooses the GPU of a host on which a rank of a CUDA backend computes.
#ifndef COMM_STARTUP_RANK_GPU_H_
#define COMM_STARTUP_RANK_GPU_H_

#include <c10/core/Device.h>

#include <optional>

#include "absl/status/statusor.h"

namespace fsdp::comm {

// Returns GPU `index`, by default the calling thread's current one.
// FailedPrecondition: there is no GPU or driver. InvalidArgument: there is no
// GPU of this index.
absl::StatusOr<c10::Device> FindGpu(std::optional<int> index);

// Chooses the GPU of a host's rank `local_rank` and returns its index: `index`,
// by default `local_rank` modulo the number of GPUs. Makes it the calling
// thread's current one, because LibTorch returns to the current GPU and would
// initialise that one too. FailedPrecondition: there is no GPU.
absl::StatusOr<int> TakeGpu(std::optional<int> index, int local_rank);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_RANK_GPU_H_
