// Converts CUDA's error codes to absl::Status.
#ifndef BASE_CUDA_STATUS_H_
#define BASE_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp {

// Returns OK for cudaSuccess; otherwise "`what`: CUDA's text (its name): what
// to do". Codes:
//   out of memory                                  -> ResourceExhausted
//   no device, no driver, one that is too old, no
//   code for this GPU                              -> FailedPrecondition
//   a device that is lost or in use                -> Unavailable
//   an invalid value or device                     -> InvalidArgument
//   not supported                                  -> Unimplemented
//   anything else                                  -> Internal
// Needs no GPU. Thread-safe.
absl::Status CudaToStatus(cudaError_t error, absl::string_view what);

}  // namespace fsdp

#endif  // BASE_CUDA_STATUS_H_
