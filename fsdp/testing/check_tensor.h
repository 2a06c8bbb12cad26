// Comparison of tensors for functions that return a Status.
#ifndef FSDP_TESTING_CHECK_TENSOR_H_
#define FSDP_TESTING_CHECK_TENSOR_H_

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace fsdp::testing {

// Returns OK if at::equal() does, else Internal with `what` it is and where it
// is off most.
absl::Status CheckTensor(const at::Tensor& actual, const at::Tensor& expected,
                         absl::string_view what);

// The same with at::allclose().
absl::Status CheckTensor(const at::Tensor& actual, const at::Tensor& expected,
                         double rtol, double atol, absl::string_view what);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_CHECK_TENSOR_H_
