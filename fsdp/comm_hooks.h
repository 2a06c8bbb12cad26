// Reductions by other means than the communicator's own.
#ifndef FSDP_COMM_HOOKS_H_
#define FSDP_COMM_HOOKS_H_

#include <c10/core/ScalarType.h>

#include "fsdp/runtime/reduction_hooks.h"

namespace fsdp {

// Reduces in `dtype`, fp16 or bf16, what is kept in a wider one: half the bytes
// for sums that are rounded. After fp16_compress_hook and bf16_compress_hook of
// PyTorch.
ReduceScatterHook CompressedReduceScatter(c10::ScalarType dtype);
AllReduceHook CompressedAllReduce(c10::ScalarType dtype);

}  // namespace fsdp

#endif  // FSDP_COMM_HOOKS_H_
