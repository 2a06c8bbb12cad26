// The hooks that users register on parameters. Autograd runs those of a leaf
// when it accumulates a gradient, which sharded parameters do not.
#ifndef FSDP_AUTOGRAD_PARAMETER_HOOKS_H_
#define FSDP_AUTOGRAD_PARAMETER_HOOKS_H_

#include <ATen/core/Tensor.h>

namespace fsdp {

// Whether at::Tensor::register_hook() was called on `tensor`.
bool HasTensorHooks(const at::Tensor& tensor);
// Whether it has hooks for after its gradient was accumulated.
bool HasPostAccumulateHooks(const at::Tensor& tensor);

// Runs those of register_hook() in the order of registration, each with what
// the one before has returned; the last one's result. Throws what they throw,
// and c10::Error for a result of another shape.
at::Tensor RunTensorHooks(const at::Tensor& tensor, const at::Tensor& gradient);

}  // namespace fsdp

#endif  // FSDP_AUTOGRAD_PARAMETER_HOOKS_H_
