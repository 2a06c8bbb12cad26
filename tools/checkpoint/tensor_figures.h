// Figures of the values of a tensor, or of the differences of two.
#ifndef TOOLS_CHECKPOINT_TENSOR_FIGURES_H_
#define TOOLS_CHECKPOINT_TENSOR_FIGURES_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint::tool {

// All but the counts are of finite values.
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
  // Of these, those in which one is NaN, or an infinity that the other is not.
  int64_t not_finite = 0;
  double absolute = 0;  // the largest |a - b|
  double relative = 0;  // the largest |a - b| / max(|a|, |b|)
  int64_t at = -1;      // the element with the largest |a - b|

  // `first` is the number of a[0] in the tensor. `a` and `b` are equally long.
  // NaN equals NaN.
  void Add(int64_t first, absl::Span<const double> a,
           absl::Span<const double> b);
};

// Returns the number with six digits.
std::string NumberText(double value);

// Returns whether there are figures of the type: F64, F32, BF16, F16, integers
// and BOOL.
bool IsNumber(Dtype dtype);

// Convert IEEE 754's binary16, and the upper half of a binary32.
double FromF16(uint16_t bits);
double FromBF16(uint16_t bits);

// Appends the elements in `bytes`, exactly except for integers of more than 53
// bits. `dtype` is one that IsNumber() accepts; `bytes` has whole elements, at
// any address.
void AppendNumbers(Dtype dtype, absl::Span<const char> bytes,
                   std::vector<double>& out);

// Returns one element in full; as hexadecimal bytes if it is no number.
std::string ElementText(Dtype dtype, absl::string_view bytes);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TENSOR_FIGURES_H_
