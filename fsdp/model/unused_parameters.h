// Finds parameters that no rank has used in the first steps of a training.
#ifndef FSDP_MODEL_UNUSED_PARAMETERS_H_
#define FSDP_MODEL_UNUSED_PARAMETERS_H_

#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class UnusedParameters {
 public:
  // Two optimizers of one model may take turns.
  static constexpr int kStepsLookedAt = 2;

  // Returns whether the steps that are looked at have ended.
  bool is_over() const { return steps_ended_ == kStepsLookedAt; }
  // Notes which of `shards`, the same at every call, have a gradient. Call it
  // after a backward that has reduced all gradients. Does nothing if is_over().
  void NoteGradients(absl::Span<const TensorRange> shards);
  // Call it before the next forward or backward: a step has ended once the
  // gradients of a backward are dropped. Returns the trainable parameters that
  // had no gradient in the first kStepsLookedAt steps, at the end of the last.
  std::vector<std::string> NoteEndOfStep(absl::Span<const TensorRange> shards);

 private:
  bool has_reduced_ = false;            // a backward of the step under way has
  int steps_ended_ = 0;                 // at most as many as are looked at
  std::vector<bool> has_had_gradient_;  // of the shards
};

}  // namespace fsdp

#endif  // FSDP_MODEL_UNUSED_PARAMETERS_H_
