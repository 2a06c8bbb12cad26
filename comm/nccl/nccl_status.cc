#include "comm/nccl/nccl_status.h"

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace fsdp::comm {
namespace {

struct Meaning {
  absl::StatusCode code;
  absl::string_view advice;
};

Meaning MeaningOf(ncclResult_t result) {
  switch (result) {
    case ncclRemoteError:
      return {absl::StatusCode::kUnavailable,
              "a peer has failed or is gone; its own error says why"};
    case ncclSystemError:
      return {absl::StatusCode::kUnavailable,
              "a socket, a file or shared memory failed, often because a peer "
              "is gone or the network is not reachable; see NCCL_SOCKET_IFNAME "
              "and NCCL_DEBUG=WARN"};
    case ncclInvalidArgument:
      return {absl::StatusCode::kInvalidArgument,
              "NCCL_DEBUG=WARN says which argument"};
    case ncclInvalidUsage:
      return {absl::StatusCode::kInvalidArgument,
              "two ranks on one GPU, perhaps; each rank needs its own"};
    case ncclInProgress:
      return {absl::StatusCode::kDeadlineExceeded,
              "not done in time; a rank is missing, or the network is not "
              "reachable (NCCL_SOCKET_IFNAME)"};
    case ncclUnhandledCudaError:
      return {absl::StatusCode::kInternal,
              "an earlier kernel or a full GPU may have caused it; "
              "NCCL_DEBUG=WARN says which call"};
    default:
      return {absl::StatusCode::kInternal, "NCCL_DEBUG=WARN says more"};
  }
}

}  // namespace

absl::Status NcclToStatus(ncclResult_t result, absl::string_view what,
                          absl::string_view detail) {
  if (result == ncclSuccess) return absl::OkStatus();
  const Meaning meaning = MeaningOf(result);
  return absl::Status(
      meaning.code,
      absl::StrCat(what, ": NCCL says ", ncclGetErrorString(result),
                   detail.empty() ? "" : "; ", detail, ": ", meaning.advice));
}

ncclDataType_t NcclDtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Float:
      return ncclFloat32;
    case at::ScalarType::Double:
      return ncclFloat64;
    case at::ScalarType::Half:
      return ncclFloat16;
    case at::ScalarType::BFloat16:
      return ncclBfloat16;
    case at::ScalarType::Int:
      return ncclInt32;
    case at::ScalarType::Long:
      return ncclInt64;
    default:
      FSDP_CHECK(dtype == at::ScalarType::Byte);
      return ncclUint8;
  }
}

ncclRedOp_t NcclReduction(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return ncclMin;
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kSum:
      break;
  }
  return ncclSum;
}

}  // namespace fsdp::comm
