// The precision in which a model's units run: what their forwards cast, and
// eval mode, which may mean full precision.
#ifndef FSDP_MODEL_PRECISION_SWITCH_H_
#define FSDP_MODEL_PRECISION_SWITCH_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "fsdp/options/options.h"

namespace fsdp {

// A buffer of a model, whose tensor keeps its identity when it is cast. Values
// are rounded then, and stay rounded.
struct CastBuffer {
  std::string name;
  at::Tensor tensor;
  c10::ScalarType original;
  c10::ScalarType wanted;
  int unit;  // the innermost around its module
};

// Not thread-safe.
class PrecisionSwitch {
 public:
  // `units` has the options of each unit, the root first. Casts `buffers`, as
  // training has them. `is_training` tells the mode of the root module; null:
  // it is always training.
  PrecisionSwitch(std::vector<MixedPrecision> units,
                  std::vector<CastBuffer> buffers,
                  std::function<bool()> is_training);

  bool is_training() const { return !is_training_ || is_training_(); }
  const std::vector<CastBuffer>& buffers() const { return buffers_; }

  // Follows the mode of the root module: if it differs from that of the last
  // call and units compute in full precision in eval mode, `apply` gets these
  // units and what they compute in from now on, and buffers are cast. Call it
  // between forwards. If `apply` fails, nothing has changed here.
  absl::Status FollowMode(
      absl::FunctionRef<absl::Status(absl::Span<const int> units, bool full)>
          apply);

  // --- One forward of a unit ------------------------------------------------
  // Returns whether CastInputs() has to be called.
  bool CastsInputs(int unit) const;
  void CastInputs(int unit, absl::Span<at::Tensor* const> inputs) const;
  void CastOutputs(int unit, absl::Span<at::Tensor* const> outputs) const;

  // Returns whether the unit runs in full precision because of eval mode.
  bool InFullPrecision(int unit) const;
  // FailedPrecondition, naming the unit: its graph was recorded when
  // InFullPrecision() was another than now. Tensors that a graph has saved
  // refer to the storage of its precision.
  absl::Status CheckGraph(int unit, const std::string& name,
                          bool in_full_precision) const;

 private:
  void CastBuffers() const;

  const std::vector<MixedPrecision> units_;
  const std::vector<CastBuffer> buffers_;
  const std::function<bool()> is_training_;
  bool full_ = false;  // the mode says so, at the last FollowMode()
};

}  // namespace fsdp

#endif  // FSDP_MODEL_PRECISION_SWITCH_H_
