// Tensors that have no memory but know how their values come about: what was
// run on them is recorded and runs when the values are wanted (the idea of
// torchdistX's deferred initialisation).
#ifndef FSDP_DEFERRED_DEFERRED_TENSOR_H_
#define FSDP_DEFERRED_DEFERRED_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>

#include "fsdp/deferred/recorded_op.h"

namespace fsdp {

// Whether the storage of `tensor` is one of these. Costs a nanosecond.
bool IsDeferred(const at::Tensor& tensor);

// The values of a tensor: itself, unless it is deferred; then the operators
// that lead to it are run, its history, and the result is in memory of its own.
// The tensor stays deferred. Equal results every time: random operators have
// seeds of their own. Throws what the operators throw.
at::Tensor ValueOf(const at::Tensor& tensor);

// Gives the storage of a deferred tensor memory with the values of ValueOf().
// All tensors that look into it are ordinary ones afterwards.
void Materialize(const at::Tensor& tensor);

namespace deferred_internal {

// A tensor without memory whose storage is output `output` of `op`.
at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device);
// `op` has been the last to write the storage of `tensor`, which is deferred.
void SetLastOp(const at::Tensor& tensor,
               const std::shared_ptr<const RecordedOp>& op);

}  // namespace deferred_internal
}  // namespace fsdp

#endif  // FSDP_DEFERRED_DEFERRED_TENSOR_H_
