#include "comm/quantized/quantization_log.h"

#include <algorithm>
#include <cmath>

namespace fsdp::comm {
namespace {

void AddTo(QuantizationLog::Totals& totals, int64_t count,
           const QuantizationError& error) {
  totals.count += count;
  totals.error.max_abs = std::max(totals.error.max_abs, error.max_abs);
  totals.error.squared_error += error.squared_error;
  totals.error.squared_norm += error.squared_norm;
  totals.error.not_finite += error.not_finite;
}

}  // namespace

double QuantizationError::relative_l2() const {
  if (squared_error == 0) return 0;
  return std::sqrt(squared_error / squared_norm);
}

void QuantizationLog::Add(Collective collective, absl::string_view label,
                          const QuantizationError& error) {
  absl::MutexLock lock(&mutex_);
  AddTo(totals_[{collective, std::string(label)}], 1, error);
}

void QuantizationLog::Clear() {
  absl::MutexLock lock(&mutex_);
  totals_.clear();
}

QuantizationLog::Totals QuantizationLog::TotalsOf(Collective collective) const {
  absl::MutexLock lock(&mutex_);
  Totals sum;
  for (const auto& [key, totals] : totals_) {
    if (key.first == collective) AddTo(sum, totals.count, totals.error);
  }
  return sum;
}

QuantizationLog::Totals QuantizationLog::TotalsOf(
    Collective collective, absl::string_view label) const {
  absl::MutexLock lock(&mutex_);
  const auto found = totals_.find({collective, std::string(label)});
  return found == totals_.end() ? Totals() : found->second;
}

}  // namespace fsdp::comm
