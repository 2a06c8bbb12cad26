#include "fsdp/model/precision_switch.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr int kRoot = 0;

}  // namespace

PrecisionSwitch::PrecisionSwitch(std::vector<MixedPrecision> units,
                                 std::vector<CastBuffer> buffers,
                                 std::function<bool()> is_training)
    : units_(std::move(units)),
      buffers_(std::move(buffers)),
      is_training_(std::move(is_training)) {
  CastBuffers();
}

void PrecisionSwitch::CastBuffers() const {
  for (const CastBuffer& buffer : buffers_) {
    const c10::ScalarType dtype = full_ ? buffer.original : buffer.wanted;
    if (buffer.tensor.scalar_type() == dtype) continue;
    const NormalMode normal;
    buffer.tensor.set_data(buffer.tensor.to(dtype));
  }
}

absl::Status PrecisionSwitch::FollowMode(
    absl::FunctionRef<absl::Status(absl::Span<const int> units, bool full)>
        apply) {
  const bool full = !is_training();
  if (full == full_) return absl::OkStatus();
  std::vector<int> changed;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].full_precision_in_eval) {
      changed.push_back(static_cast<int>(unit));
    }
  }
  if (!changed.empty()) FSDP_RETURN_IF_ERROR(apply(changed, full));
  full_ = full;
  if (!changed.empty()) CastBuffers();
  return absl::OkStatus();
}

bool PrecisionSwitch::InFullPrecision(int unit) const {
  return full_ && units_[unit].full_precision_in_eval;
}

bool PrecisionSwitch::CastsInputs(int unit) const {
  if (InFullPrecision(unit)) return false;
  const MixedPrecision& precision = units_[unit];
  if (precision.force_input_to_fp32) return true;
  if (!precision.param_dtype.has_value()) return false;
  return precision.cast_inputs == fsdp::CastInputs::kEveryUnit ||
         (precision.cast_inputs == fsdp::CastInputs::kRoot && unit == kRoot);
}

void PrecisionSwitch::CastInputs(int unit,
                                 absl::Span<at::Tensor* const> inputs) const {
  const MixedPrecision& precision = units_[unit];
  for (at::Tensor* input : inputs) {
    if (!input->defined() || !input->is_floating_point()) continue;
    if (!precision.force_input_to_fp32) {
      *input = input->to(*precision.param_dtype);
    } else if (c10::isReducedFloatingType(input->scalar_type())) {
      *input = input->to(at::kFloat);
    }
  }
}

void PrecisionSwitch::CastOutputs(int unit,
                                  absl::Span<at::Tensor* const> outputs) const {
  const auto dtype = units_[unit].output_dtype;
  if (unit != kRoot || !dtype.has_value() || InFullPrecision(unit)) return;
  for (at::Tensor* output : outputs) {
    if (!output->defined() || !output->is_floating_point()) continue;
    *output = output->to(*dtype);
  }
}

absl::Status PrecisionSwitch::CheckGraph(int unit, const std::string& name,
                                         bool in_full_precision) const {
  if (in_full_precision == InFullPrecision(unit)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "backward through unit ", name,
      " after a forward in another mode, which with full_precision_in_eval "
      "computes in another precision: run the backward of a training forward "
      "before the next forward in eval mode"));
}

}  // namespace fsdp
