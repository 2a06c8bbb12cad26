// Dtypes of LibTorch as files name them.
#ifndef CHECKPOINT_RUN_TORCH_DTYPE_H_
#define CHECKPOINT_RUN_TORCH_DTYPE_H_

#include <c10/core/ScalarType.h>

#include <optional>

#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint {

// Nothing where the other side has none: quantized and packed dtypes of
// LibTorch, sub-byte ones of files.
std::optional<Dtype> FileDtype(c10::ScalarType dtype);
std::optional<c10::ScalarType> TorchDtype(Dtype dtype);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_TORCH_DTYPE_H_
