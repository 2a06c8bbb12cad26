// Tensors without memory, whose operators are recorded and run when values are
// wanted (the idea of torchdistX's deferred initialisation).
#ifndef FSDP_DEFERRED_DEFERRED_TENSOR_H_
#define FSDP_DEFERRED_DEFERRED_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>

#include "fsdp/deferred/recorded_op.h"

namespace fsdp {

// Returns whether `tensor` is deferred. Costs a nanosecond.
bool IsDeferred(const at::Tensor& tensor);

// Returns the values of `tensor`. They are `tensor` itself unless it is
// deferred; then its history, the operators that lead to it, runs, and the
// result has its own memory. The tensor stays deferred. Results are equal every
// time, because random operators have their own seeds. Throws what the
// operators throw.
at::Tensor ValueOf(const at::Tensor& tensor);

// Gives the storage of a deferred tensor memory with the values of ValueOf().
// All tensors that look into the storage are then ordinary ones.
void Materialize(const at::Tensor& tensor);

namespace deferred_internal {

// Returns a tensor without memory whose storage is output `output` of `op`.
at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device);
// Notes that `op` was the last to write the storage of `tensor`, which is
// deferred.
void SetLastOp(const at::Tensor& tensor,
               const std::shared_ptr<const RecordedOp>& op);

}  // namespace deferred_internal
}  // namespace fsdp

#endif  // FSDP_DEFERRED_DEFERRED_TENSOR_H_
