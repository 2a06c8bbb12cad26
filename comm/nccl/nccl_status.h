// NCCL's error codes as absl::Status, and its names for dtypes and reductions.
#ifndef COMM_NCCL_NCCL_STATUS_H_
#define COMM_NCCL_NCCL_STATUS_H_

#include <c10/core/ScalarType.h>
#include <nccl.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/call.h"

namespace fsdp::comm {

// OK for ncclSuccess; otherwise "`what`: NCCL's text; `detail`: what to do".
// `detail` is what ncclGetLastError() says and may be empty. Codes:
//   a peer or the network failed           -> Unavailable
//   a CUDA call failed, NCCL is broken     -> Internal
//   the call or its arguments are wrong    -> InvalidArgument
//   still in progress                      -> DeadlineExceeded
// Needs no GPU. Thread-safe.
absl::Status NcclToStatus(ncclResult_t result, absl::string_view what,
                          absl::string_view detail = "");

// Of a dtype and a reduction that communicators take.
ncclDataType_t NcclDtype(at::ScalarType dtype);
ncclRedOp_t NcclReduction(ReduceOp op);

}  // namespace fsdp::comm

#endif  // COMM_NCCL_NCCL_STATUS_H_
