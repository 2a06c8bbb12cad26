#include "fsdp/model/unused_parameters.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ranges/tensor_range.h"

namespace fsdp {

void UnusedParameters::NoteGradients(absl::Span<const TensorRange> shards) {
  if (is_over()) return;
  has_reduced_ = true;
  has_had_gradient_.resize(shards.size());
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].values.grad().defined()) has_had_gradient_[i] = true;
  }
}

std::vector<std::string> UnusedParameters::NoteEndOfStep(
    absl::Span<const TensorRange> shards) {
  if (!has_reduced_ ||
      std::any_of(shards.begin(), shards.end(), [](const TensorRange& named) {
        return named.values.grad().defined();
      })) {
    return {};
  }
  has_reduced_ = false;
  if (++steps_ended_ != kStepsLookedAt) return {};
  std::vector<std::string> names;
  for (size_t i = 0; i < shards.size(); ++i) {
    if (shards[i].values.requires_grad() && !has_had_gradient_[i]) {
      names.push_back(shards[i].name);
    }
  }
  return names;
}

}  // namespace fsdp
