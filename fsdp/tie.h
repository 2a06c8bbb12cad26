// Ties two parameters, so that they have one value.
#ifndef FSDP_TIE_H_
#define FSDP_TIE_H_

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"

namespace fsdp {

// Makes the parameter `tied` share the memory of `parameter`, before sharding:
//   FSDP_RETURN_IF_ERROR(fsdp::Tie(net->embed->weight, net->head->weight));
// Both keep their names. After sharding they are one parameter of the innermost
// unit around both, gathered once, with the sum of the gradients; before it,
// each collects a gradient of its own. `a->weight = b->weight` does not tie: it
// replaces the member of `a`, but not the parameter that `a` has registered.
// InvalidArgument: one is undefined, or sizes, dtypes or devices differ.
// FailedPrecondition: one is sharded or has a gradient.
absl::Status Tie(const at::Tensor& parameter, const at::Tensor& tied);

}  // namespace fsdp

#endif  // FSDP_TIE_H_
