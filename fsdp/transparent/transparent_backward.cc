// The backward half of TransparentUnits.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/transparent/transparent.h"

namespace fsdp {
namespace {

// Returns the sequence number of the node that backward runs. Nodes with higher
// numbers have run or never will, except for leaves', whose number is the
// highest and says nothing.
uint64_t CurrentSequence() {
  const std::shared_ptr<torch::autograd::Node> node =
      torch::autograd::get_current_node();
  constexpr uint64_t kNoneHigher = UINT64_MAX - 1;
  return node == nullptr ? kNoneHigher
                         : std::min<uint64_t>(node->sequence_nr(), kNoneHigher);
}

}  // namespace

absl::Status TransparentUnits::OnBackwardOperator(absl::Span<const int> units,
                                                  bool nested) {
  // A backward that threw has not reported its end.
  if (!model_->in_backward()) ForgetBackward();
  absl::InlinedVector<int, 4> missing;
  for (int unit : units) {
    const UnitState& state = units_[unit];
    if (!state.in_backward && state.forwards == 0) missing.push_back(unit);
  }
  if (missing.empty()) return absl::OkStatus();
  std::sort(missing.begin(), missing.end());
  const Acting acting(this);
  if (!nested) FSDP_RETURN_IF_ERROR(EndFrozenUnlessRelatedTo(units));
  for (int unit : missing) FSDP_RETURN_IF_ERROR(BeginBackward(unit));
  return absl::OkStatus();
}

absl::Status TransparentUnits::BeginBackward(int unit) {
  UnitState& state = units_[unit];
  state.read_by_backward = true;
  PreBackwardInfo info{unit, CurrentSequence(), std::nullopt, false};
  // The operator belongs to the last use that began before it.
  for (const std::weak_ptr<Node>& weak : state.nodes) {
    const std::shared_ptr<Node> node = weak.lock();
    if (node == nullptr || node->sequence_nr() > info.exit_sequence) continue;
    info.has_unit_node = true;
    info.start_sequence = node->sequence_nr();
    info.forward_thread = node->thread_id();
  }
  FSDP_RETURN_IF_ERROR(TorchToStatus(
      absl::StrCat("the backward of unit ", model_->unit_name(unit)),
      [&] { model_->OnPreBackward(info); }));
  if (state.is_frozen && !info.has_unit_node) frozen_.push_back(unit);
  return absl::OkStatus();
}

void TransparentUnits::ForgetBackward() {
  for (UnitState& state : units_) state.in_backward = false;
  frozen_.clear();
}

absl::Status TransparentUnits::EndFrozenUnlessRelatedTo(
    absl::Span<const int> units) {
  const std::vector<int> frozen = frozen_;
  const uint64_t sequence = CurrentSequence();
  for (int unit : frozen) {
    const bool is_inside =
        std::any_of(units.begin(), units.end(),
                    [&](int other) { return IsAncestor(other, unit); });
    if (is_inside || IsAround(unit, units)) continue;
    FSDP_RETURN_IF_ERROR(TorchToStatus(
        absl::StrCat("the backward of unit ", model_->unit_name(unit)), [&] {
          model_->OnPostBackward({unit, sequence}, {});
        }));
  }
  return absl::OkStatus();
}

absl::Status TransparentUnits::BeforePreBackward(int unit) {
  FSDP_RETURN_IF_ERROR(Failure());
  FSDP_RETURN_IF_ERROR(CheckNotCaptured());
  if (!acting_) {
    const Acting acting(this);
    FSDP_RETURN_IF_ERROR(EndFrozenUnlessRelatedTo({unit}));
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      const std::shared_ptr<Node> exit = torch::autograd::get_current_node();
      graphs_.erase(
          std::remove_if(graphs_.begin(), graphs_.end(),
                         [&](const auto& p) { return p.lock() == exit; }),
          graphs_.end());
    }
  }
  units_[unit].in_backward = true;
  return absl::OkStatus();
}

// The exits of a unit check this only for that unit.
absl::Status TransparentUnits::CheckNotCaptured() const {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return absl::OkStatus();
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    for (const std::weak_ptr<Node>& weak : units_[unit].nodes) {
      FSDP_RETURN_IF_ERROR(
          CheckComputesNoGradientOf(weak.lock(), model_->unit_name(unit)));
    }
  }
  return absl::OkStatus();
}

absl::Status TransparentUnits::BeforePostBackward(int unit) {
  FSDP_RETURN_IF_ERROR(Failure());
  if (!acting_) {
    FSDP_RETURN_IF_ERROR(CheckRecordsNoGraph(model_->unit_name(unit)));
  }
  units_[unit].in_backward = false;
  frozen_.erase(std::remove(frozen_.begin(), frozen_.end(), unit),
                frozen_.end());
  return absl::OkStatus();
}

absl::Status TransparentUnits::BeforeEndOfBackward() {
  ForgetBackward();
  for (UnitState& state : units_) {
    if (state.used) state.was_read_by_backward = state.read_by_backward;
    state.used = state.read_by_backward = false;
  }
  ObserveAsLongAsNeeded();
  return Failure();
}

}  // namespace fsdp
