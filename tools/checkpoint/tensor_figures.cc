#include "tools/checkpoint/tensor_figures.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/strings/str_format.h"

namespace fsdp::checkpoint::tool {

void TensorFigures::Add(absl::Span<const double> values) {
  // Sums of parts keep what one long sum would lose.
  double part = 0;
  double part_squares = 0;
  for (const double value : values) {
    if (std::isnan(value)) {
      ++nans;
    } else if (std::isinf(value)) {
      ++infinities;
    } else {
      ++finite;
      if (value == 0) ++zeros;
      min = std::min(min, value);
      max = std::max(max, value);
      part += value;
      part_squares += value * value;
    }
  }
  sum += part;
  squares += part_squares;
}

double TensorFigures::Mean() const { return sum / static_cast<double>(finite); }

double TensorFigures::Norm() const { return std::sqrt(squares); }

void Differences::Add(int64_t first, absl::Span<const double> a,
                      absl::Span<const double> b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    ++elements;
    const double difference = std::abs(a[i] - b[i]);
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
      ++not_finite;
      continue;
    }
    relative = std::max(relative,
                        difference / std::max(std::abs(a[i]), std::abs(b[i])));
    if (difference > absolute || at < 0) {
      absolute = difference;
      at = first + static_cast<int64_t>(i);
    }
  }
}

std::string NumberText(double value) { return absl::StrFormat("%.6g", value); }

}  // namespace fsdp::checkpoint::tool
