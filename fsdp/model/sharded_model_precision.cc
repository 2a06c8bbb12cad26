// The dtypes in which a ShardedModel's forward computes.
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

// Eval mode may mean full precision. Units are released at a change, which
// comes between forwards only: what is gathered has the other precision.
absl::Status ShardedModel::ChoosePrecision() {
  const bool full = settings_.is_training && !settings_.is_training();
  if (full == full_precision_) return absl::OkStatus();
  bool any = false;
  for (int unit = 0; unit < num_units(); ++unit) {
    if (!settings_.units[unit].precision.full_precision_in_eval) continue;
    if (!any) FSDP_RETURN_IF_ERROR(ReleaseUnsharded());
    any = true;
    runtime_->SetPrecision(unit, full ? flat_param::Precision::kFull
                                      : flat_param::Precision::kCompute);
  }
  full_precision_ = full;
  if (!any) return absl::OkStatus();
  precisions_.emplace_back(at::sequence_number::peek(), full);
  if (full) {
    settings_.buffers.Restore();
  } else {
    settings_.buffers.Cast();
  }
  return absl::OkStatus();
}

bool ShardedModel::InFullPrecision(int unit) const {
  return full_precision_ &&
         settings_.units[unit].precision.full_precision_in_eval;
}

bool ShardedModel::CastsInputs(int unit) const {
  if (InFullPrecision(unit)) return false;
  const MixedPrecision& precision = settings_.units[unit].precision;
  if (precision.force_input_to_fp32) return true;
  if (!precision.param_dtype.has_value()) return false;
  return precision.cast_inputs == fsdp::CastInputs::kEveryUnit ||
         (precision.cast_inputs == fsdp::CastInputs::kRoot && unit == kRoot);
}

void ShardedModel::CastInputs(int unit,
                              const std::vector<at::Tensor*>& inputs) const {
  const MixedPrecision& precision = settings_.units[unit].precision;
  for (at::Tensor* input : inputs) {
    if (!input->defined() || !input->is_floating_point()) continue;
    if (!precision.force_input_to_fp32) {
      *input = input->to(*precision.param_dtype);
    } else if (c10::isReducedFloatingType(input->scalar_type())) {
      *input = input->to(at::kFloat);
    }
  }
}

void ShardedModel::CastOutputs(int unit,
                               const std::vector<at::Tensor*>& outputs) const {
  const auto dtype = settings_.units[unit].precision.output_dtype;
  if (unit != kRoot || !dtype.has_value() || InFullPrecision(unit)) return;
  for (at::Tensor* output : outputs) {
    if (!output->defined() || !output->is_floating_point()) continue;
    *output = output->to(*dtype);
  }
}

// Tensors that a graph has saved refer to the storage of its precision.
absl::Status ShardedModel::CheckPrecisionOf(const PreBackwardInfo& info) const {
  if (!settings_.units[info.unit].precision.full_precision_in_eval) {
    return absl::OkStatus();
  }
  const auto since = std::find_if(
      precisions_.rbegin(), precisions_.rend(),
      [&](auto& entry) { return entry.first <= info.exit_sequence; });
  const bool was_full = since != precisions_.rend() && since->second;
  if (was_full == full_precision_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "backward through unit ", unit_name(info.unit),
      " after a forward in another mode, which with full_precision_in_eval "
      "computes in another precision: run the backward of a training forward "
      "before the next forward in eval mode"));
}

}  // namespace fsdp
