// Copies of gradients, on the host by ways around operators where these cost
// more than the copy.
#ifndef FSDP_RUNTIME_GRADIENT_COPY_H_
#define FSDP_RUNTIME_GRADIENT_COPY_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp {

// Of contiguous tensors of one size. Multiplies in the wider of the two dtypes.
void CopyScaled(at::Tensor target, const at::Tensor& source, double scale);

// The same into a buffer of `buffer_bytes`, which is read only when other ranks
// are as far.
void CopyGradient(const at::Tensor& source, double scale, int64_t buffer_bytes,
                  const at::Tensor& target);

}  // namespace fsdp

#endif  // FSDP_RUNTIME_GRADIENT_COPY_H_
