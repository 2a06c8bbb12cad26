#include "examples/llama/training/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace llama {

double LearningRate::At(int64_t step) const {
  if (step < warmup) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  const auto left = static_cast<double>(std::max<int64_t>(steps - warmup, 1));
  const double done = std::min(static_cast<double>(step - warmup) / left, 1.0);
  const double cosine = 0.5 * (1 + std::cos(std::acos(-1.0) * done));
  return peak * (floor + (1 - floor) * cosine);
}

}  // namespace llama
