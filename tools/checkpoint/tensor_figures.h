// What the values of a tensor, or the differences of two, look like.
#ifndef TOOLS_CHECKPOINT_TENSOR_FIGURES_H_
#define TOOLS_CHECKPOINT_TENSOR_FIGURES_H_

#include <cstdint>
#include <limits>
#include <string>

#include "absl/types/span.h"

namespace fsdp::checkpoint::tool {

// All but counts are of finite values.
struct TensorFigures {
  int64_t finite = 0;
  int64_t zeros = 0;
  int64_t nans = 0;
  int64_t infinities = 0;
  double min = std::numeric_limits<double>::infinity();
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  double squares = 0;

  void Add(absl::Span<const double> values);
  double Mean() const;
  double Norm() const;
};

struct Differences {
  int64_t elements = 0;  // that differ
  // Of those, where one is NaN, or an infinity that the other is not.
  int64_t not_finite = 0;
  double absolute = 0;  // the largest |a - b|
  double relative = 0;  // the largest |a - b| / max(|a|, |b|)
  int64_t at = -1;      // the element with the largest |a - b|

  // `first`: the number of a[0] in the tensor. Both are as long. NaN equals
  // NaN.
  void Add(int64_t first, absl::Span<const double> a,
           absl::Span<const double> b);
};

// With six digits.
std::string NumberText(double value);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TENSOR_FIGURES_H_
