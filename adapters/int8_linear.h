// A linear layer whose weight is int8 while nobody computes with it.
#ifndef ADAPTERS_INT8_LINEAR_H_
#define ADAPTERS_INT8_LINEAR_H_

#include <ATen/core/Tensor.h>

#include "adapters/int8_rows.h"

namespace fsdp::adapters {

// Returns y = x W^T + bias, [..., in] -> [..., out], as at::linear() computes
// it, where W is Unpack(layout, weight) in the dtype of x. Forward and backward
// each make W again and keep neither W nor x, so that one matrix exists at a
// time. The weight gets no gradient; `bias` may be undefined, and gets one if
// it requires it. Throws StatusError (FailedPrecondition) if the weight is not
// such bytes, for example after a module's to(dtype).
at::Tensor Int8Linear(const Int8Rows& layout, const at::Tensor& x,
                      const at::Tensor& weight, const at::Tensor& bias);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_INT8_LINEAR_H_
