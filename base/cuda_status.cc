#include "base/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace fsdp {
namespace {

struct Meaning {
  absl::StatusCode code;
  absl::string_view advice;
};

Meaning MeaningOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return {absl::StatusCode::kResourceExhausted,
              "the GPU's memory is full; use a smaller batch, more ranks, "
              "checkpointing or offloading, and see what else runs on it"};
    case cudaErrorNoDevice:
      return {absl::StatusCode::kFailedPrecondition,
              "this machine shows no GPU to this process; see nvidia-smi and "
              "CUDA_VISIBLE_DEVICES"};
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
      return {absl::StatusCode::kFailedPrecondition,
              "NVIDIA's driver is missing or older than this CUDA runtime; "
              "install a newer one"};
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return {absl::StatusCode::kFailedPrecondition,
              "the program holds no code for this GPU; build it with "
              "--define=fsdp_cuda_archs=..."};
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorDeviceUninitialized:
      return {absl::StatusCode::kUnavailable,
              "the GPU is busy or broken; see nvidia-smi and dmesg"};
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevice:
      return {absl::StatusCode::kInvalidArgument,
              "no such device or argument; CUDA_VISIBLE_DEVICES says which "
              "devices this process sees"};
    case cudaErrorNotSupported:
      return {absl::StatusCode::kUnimplemented,
              "this GPU or driver cannot do that"};
    default:
      return {absl::StatusCode::kInternal,
              "an earlier kernel may have caused it; CUDA_LAUNCH_BLOCKING=1 "
              "and compute-sanitizer show which"};
  }
}

}  // namespace

absl::Status CudaToStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const Meaning meaning = MeaningOf(error);
  return absl::Status(
      meaning.code,
      absl::StrCat(what, ": ", cudaGetErrorString(error), " (",
                   cudaGetErrorName(error), "): ", meaning.advice));
}

}  // namespace fsdp
