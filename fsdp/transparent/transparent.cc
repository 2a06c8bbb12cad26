#include "fsdp/transparent/transparent.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/autograd/checkpoint_scope.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {
namespace {

template <typename T>
void DropExpired(std::vector<std::weak_ptr<T>>& pointers) {
  pointers.erase(
      std::remove_if(pointers.begin(), pointers.end(),
                     [](const std::weak_ptr<T>& p) { return p.expired(); }),
      pointers.end());
}

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

TransparentUnits::TransparentUnits(ShardedModel* model,
                                   std::vector<int> parents)
    : model_(model), parents_(std::move(parents)), units_(parents_.size()) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    units_[unit].tag = {this, unit};
    for (const auto& flat : model_->flats(unit)) {
      flat->SetTag(&units_[unit].tag);
    }
  }
}

TransparentUnits::~TransparentUnits() {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    for (const auto& flat : model_->flats(unit)) {
      flat->SetTag(nullptr);
    }
  }
}

bool TransparentUnits::IsAncestor(int ancestor, int unit) const {
  for (int i = parents_[unit]; i != -1; i = parents_[i]) {
    if (i == ancestor) return true;
  }
  return false;
}

bool TransparentUnits::IsAround(int unit,
                                absl::Span<const int> inner_units) const {
  return std::any_of(inner_units.begin(), inner_units.end(), [&](int inner) {
    return inner == unit || IsAncestor(unit, inner);
  });
}

// --- Forwards by fsdp::Forward, among them the root's -----------------------

absl::Status TransparentUnits::BeforePreForward(int unit) {
  if (acting_) return absl::OkStatus();
  if (stack_.empty() && !InsideBackward()) return Begin();
  EnterRecomputation();
  FSDP_RETURN_IF_ERROR(Failure());
  return CloseUnlessAround({unit});
}

absl::Status TransparentUnits::Begin() {
  TakeFailure().IgnoreError();
  // Operators on a parameter with foreign memory would not be seen.
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    for (const auto& flat : model_->flats(unit)) {
      FSDP_RETURN_IF_ERROR(flat->CheckBinding());
    }
  }
  records_graph_ = at::GradMode::is_enabled();
  thread_ = std::this_thread::get_id();
  observer_.emplace();
  return absl::OkStatus();
}

void TransparentUnits::AfterPreForward(int unit) {
  stack_.push_back({unit, acting_, /*expects_backward=*/false});
  ++units_[unit].forwards;
  in_forward_ = true;
}

absl::Status TransparentUnits::BeforePostForward(
    int unit, const std::vector<at::Tensor*>& outputs) {
  if (!acting_) {
    FSDP_RETURN_IF_ERROR(Failure());
    // Looks for parameters of any unit: those inside end with this one at the
    // latest.
    for (const at::Tensor* output : outputs) {
      const StorageTag* tag = TagOf(*output);
      if (tag == nullptr || tag->listener != this) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "an output is a parameter of unit ", model_->unit_name(tag->unit),
          " or a view of one, whose memory is about to be freed: return a copy "
          "(.clone())"));
    }
    while (!stack_.empty() && stack_.back().is_transparent) {
      FSDP_RETURN_IF_ERROR(CloseInnermost());
    }
  }
  if (!stack_.empty() && stack_.back().unit == unit) {
    stack_.pop_back();
    --units_[unit].forwards;
    in_forward_ = !stack_.empty();
  }
  return absl::OkStatus();
}

void TransparentUnits::AfterPostForward(
    int, const std::vector<std::shared_ptr<Node>>& exits) {
  if (!stack_.empty() || InsideBackward()) return;
  graphs_.insert(graphs_.end(), exits.begin(), exits.end());
  ObserveAsLongAsNeeded();
}

// The engine passes a thread's callbacks on when backward begins, to the
// threads that run it; inside backward it is too late to add them.
void TransparentUnits::ObserveAsLongAsNeeded() {
  DropExpired(graphs_);
  if (stack_.empty() && graphs_.empty()) observer_.reset();
}

// --- Operators --------------------------------------------------------------

void TransparentUnits::OnOperator(absl::Span<const int> units, bool nested) {
  absl::Status status;
  if (RecomputeScope::Current() != nullptr) {
    if (!acting_) status = OnForwardOperator(units, nested);
  } else if (InsideBackward()) {
    if (!acting_) status = OnBackwardOperator(units, nested);
  } else if (in_forward_) {
    status = CheckThread(units.front());
    if (status.ok() && !acting_) status = OnForwardOperator(units, nested);
  }
  // Between steps, an empty storage raises its own error.
  if (!status.ok()) Fail(status);
}

void TransparentUnits::OnWrite(const at::Tensor& tensor, int unit) {
  if (in_forward_ && !acting_ && !InsideBackward()) {
    Fail(model_->RefuseWrite(unit, tensor));
  }
}

absl::Status TransparentUnits::CheckThread(int unit) const {
  if (thread_ == std::this_thread::get_id()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "an operator takes a parameter of unit ", model_->unit_name(unit),
      " on another thread than that of the forward: the unit may be freed "
      "while it runs, and collectives need one order. Run the forward of a "
      "sharded model on one thread"));
}

absl::Status TransparentUnits::OnForwardOperator(absl::Span<const int> units,
                                                 bool nested) {
  absl::InlinedVector<int, 4> missing;
  for (int unit : units) {
    if (units_[unit].forwards == 0) missing.push_back(unit);
  }
  if (missing.empty()) return absl::OkStatus();
  std::sort(missing.begin(), missing.end());
  EnterRecomputation();
  const Acting acting(this);
  // An operator around this one may be reading its inputs.
  if (!nested) FSDP_RETURN_IF_ERROR(CloseUnlessAround(units));
  for (int unit : missing) {
    if (units_[unit].forwards == 0) FSDP_RETURN_IF_ERROR(OpenUnit(unit));
  }
  return absl::OkStatus();
}

// The unit gets its node at once: the graph of its forward may begin only after
// its first operator, which may run under a NoGradGuard.
absl::Status TransparentUnits::OpenUnit(int unit) {
  if (model_->precision().CastsInputs(unit)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unit ", model_->unit_name(unit),
        " is to cast its inputs, but its module was called directly: nobody "
        "sees the inputs. Call it by fsdp::Forward(child, ...), or let only "
        "the root cast"));
  }
  const at::AutoGradMode grad(records_graph_ || at::GradMode::is_enabled());
  if (at::GradMode::is_enabled() && model_->recomputes(unit)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unit ", model_->unit_name(unit),
        " is to be run again in backward, as Options::recompute.units asks, "
        "but its module was called directly: nobody can call it again. Call it "
        "by fsdp::Forward(child, ...), or put the call into "
        "fsdp::Checkpoint() and leave the unit out of "
        "Options::recompute.units"));
  }
  FSDP_RETURN_IF_ERROR(model_->PreForward(unit));
  if (!at::GradMode::is_enabled()) return absl::OkStatus();
  UnitState& state = units_[unit];
  const std::shared_ptr<Node>& node = model_->forward_node(unit);
  state.is_frozen = node == nullptr;
  state.used = true;
  stack_.back().expects_backward =
      !state.is_frozen || state.was_read_by_backward;
  if (state.is_frozen) return absl::OkStatus();
  DropExpired(state.nodes);
  state.nodes.push_back(node);
  return absl::OkStatus();
}

absl::Status TransparentUnits::CloseInnermost() {
  const Acting acting(this);
  const OpenForward innermost = stack_.back();
  return model_->PostForwardOfUnseen(innermost.unit,
                                     innermost.expects_backward);
}

absl::Status TransparentUnits::CloseUnlessAround(absl::Span<const int> units) {
  while (stack_.size() > outer_forwards_ && stack_.back().is_transparent &&
         !IsAround(stack_.back().unit, units)) {
    FSDP_RETURN_IF_ERROR(CloseInnermost());
  }
  return absl::OkStatus();
}

// --- Recomputations of checkpointed regions ---------------------------------

// A recomputation is a forward inside backward: its units get nodes of their
// own, which the region's nested backward runs. They end with it.
void TransparentUnits::EnterRecomputation() {
  RecomputeScope* const scope = RecomputeScope::Current();
  if (scope == nullptr || scope == recomputation_) return;
  scope->AtEnd([this, outer = recomputation_, forwards = outer_forwards_] {
    Fail(CloseUnlessAround({}));
    recomputation_ = outer;
    outer_forwards_ = forwards;
  });
  recomputation_ = scope;
  outer_forwards_ = stack_.size();
}

// --- Backward ---------------------------------------------------------------

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

// --- Failures ---------------------------------------------------------------

void TransparentUnits::OnGivenUp() {
  ForgetBackward();
  for (UnitState& state : units_) {
    state.forwards = 0;
    state.used = state.read_by_backward = false;
  }
  stack_.clear();
  recomputation_ = nullptr;
  outer_forwards_ = 0;
  in_forward_ = false;
  ObserveAsLongAsNeeded();
}

void TransparentUnits::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failure_.Update(status);
}

absl::Status TransparentUnits::Failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::Status TransparentUnits::TakeFailure() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(failure_, absl::OkStatus());
}

}  // namespace fsdp
