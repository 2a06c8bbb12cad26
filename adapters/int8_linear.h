// A linear layer whose weight is int8 while nobody computes with it.
#ifndef ADAPTERS_INT8_LINEAR_H_
#define ADAPTERS_INT8_LINEAR_H_

#include <ATen/core/Tensor.h>

#include "adapters/int8_rows.h"

namespace fsdp::adapters {

// y = x W^T + bias, W being Unpack(layout, weight) in the dtype of x: [..., in]
// -> [..., out], as at::linear() computes it. Forward and backward each make W
// anew and keep nothing of it or of x, so that one matrix exists at a time. The
// weight gets no gradient; `bias` may be undefined, and gets one if it requires
// it. Throws StatusError (FailedPrecondition) where the weight is no such
// bytes, after a module's to(dtype) for example.
at::Tensor Int8Linear(const Int8Rows& layout, const at::Tensor& x,
                      const at::Tensor& weight, const at::Tensor& bias);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_INT8_LINEAR_H_
