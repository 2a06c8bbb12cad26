// Comparison of tensors for tests.
#ifndef BASE_TESTING_COMPARE_TENSORS_H_
#define BASE_TESTING_COMPARE_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <c10/core/ScalarType.h>

#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fsdp::testing {

// Returns the largest difference of two elements at one place, in double, or
// infinity for tensors of different sizes.
inline double LargestDifference(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  const at::Tensor difference =
      a.cpu().to(at::kDouble).sub(b.cpu().to(at::kDouble));
  return difference.abs().max().item<double>();
}

// Returns OK if both are defined, of equal sizes and at::allclose(); else
// Internal with `what` it is and by how much it is off.
inline absl::Status CheckTensor(const at::Tensor& actual,
                                const at::Tensor& expected, double rtol,
                                double atol, absl::string_view what) {
  if (!actual.defined() || !expected.defined()) {
    return absl::InternalError(absl::StrCat(
        what, ": ", actual.defined() ? "expected" : "got", " no tensor"));
  }
  if (actual.sizes() == expected.sizes() &&
      at::allclose(actual, expected, rtol, atol)) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(what, " is off by up to ",
                                          LargestDifference(actual, expected)));
}

// Demands equal elements.
inline absl::Status CheckTensor(const at::Tensor& actual,
                                const at::Tensor& expected,
                                absl::string_view what = "the result") {
  return CheckTensor(actual, expected, 0, 0, what);
}

}  // namespace fsdp::testing

#endif  // BASE_TESTING_COMPARE_TENSORS_H_
