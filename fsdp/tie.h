// Two parameters with one value.
#ifndef FSDP_TIE_H_
#define FSDP_TIE_H_

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"

namespace fsdp {

// Makes the parameter `tied` share the memory of `parameter`, before sharding:
//   FSDP_RETURN_IF_ERROR(fsdp::Tie(net->embed->weight, net->head->weight));
// Both keep their names. Sharded they are one parameter of the innermost unit
// around both, gathered once, with the sum of the gradients. `a->weight =
// b->weight` does not tie: it replaces the member of `a` and leaves what `a`
// has registered behind. Unsharded, each still collects a gradient of its own.
// InvalidArgument: undefined, or other sizes, dtypes or devices.
// FailedPrecondition: one of them is sharded, or has a gradient.
absl::Status Tie(const at::Tensor& parameter, const at::Tensor& tied);

}  // namespace fsdp

#endif  // FSDP_TIE_H_
