// The difference of tensors, for the texts of tests.
#ifndef BASE_TESTING_LARGEST_DIFFERENCE_H_
#define BASE_TESTING_LARGEST_DIFFERENCE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <limits>

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

}  // namespace fsdp::testing

#endif  // BASE_TESTING_LARGEST_DIFFERENCE_H_
