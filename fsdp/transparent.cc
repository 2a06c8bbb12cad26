#include "fsdp/transparent.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
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
#include "fsdp/autograd.h"
#include "fsdp/sharded_model.h"

namespace fsdp {
namespace {

constexpr int kRoot = 0;

bool InsideBackward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

// Of the node that backward runs now. Any node with a higher one has run by now
// or never will; those of leaves have the highest, and tell nothing.
uint64_t CurrentSequence() {
  const std::shared_ptr<torch::autograd::Node> node =
      torch::autograd::get_current_node();
  constexpr uint64_t kNoneHigher = UINT64_MAX - 1;
  return node == nullptr ? kNoneHigher
                         : std::min<uint64_t>(node->sequence_nr(), kNoneHigher);
}

template <typename T>
void DropExpired(std::vector<std::weak_ptr<T>>& pointers) {
  pointers.erase(
      std::remove_if(pointers.begin(), pointers.end(),
                     [](const std::weak_ptr<T>& p) { return p.expired(); }),
      pointers.end());
}

}  // namespace

// While one lives, events are ours and operators are the library's own.
class TransparentUnits::Acting {
 public:
  explicit Acting(TransparentUnits* owner)
      : owner_(owner), before_(std::exchange(owner->acting_, true)) {}
  Acting(const Acting&) = delete;
  Acting& operator=(const Acting&) = delete;
  ~Acting() { owner_->acting_ = before_; }

 private:
  TransparentUnits* const owner_;
  const bool before_;
  const at::DisableRecordFunctionGuard unobserved_;
};

TransparentUnits::TransparentUnits(ShardedModel* model,
                                   std::vector<int> parents)
    : model_(model), parents_(std::move(parents)), units_(parents_.size()) {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    units_[unit].tag = {this, unit};
    for (const auto& flat : model_->runtime().flats(unit)) {
      flat->SetTag(&units_[unit].tag);
    }
  }
}

TransparentUnits::~TransparentUnits() {
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    for (const auto& flat : model_->runtime().flats(unit))
      flat->SetTag(nullptr);
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
  FSDP_RETURN_IF_ERROR(Failure());
  return CloseUnlessAround({unit});
}

absl::Status TransparentUnits::Begin() {
  TakeFailure().IgnoreError();
  // Operators on a parameter that looks elsewhere would not be seen.
  for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
    for (const auto& flat : model_->runtime().flats(unit)) {
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
}

absl::Status TransparentUnits::BeforePostForward(
    int unit, const std::vector<at::Tensor*>& outputs) {
  if (!acting_) {
    FSDP_RETURN_IF_ERROR(Failure());
    FSDP_RETURN_IF_ERROR(CheckNoneIsAParameter(outputs));
    while (!stack_.empty() && stack_.back().is_transparent) {
      FSDP_RETURN_IF_ERROR(CloseInnermost());
    }
  }
  if (!stack_.empty() && stack_.back().unit == unit) {
    stack_.pop_back();
    --units_[unit].forwards;
  }
  return absl::OkStatus();
}

// Of any unit: those inside end with this one at the latest.
absl::Status TransparentUnits::CheckNoneIsAParameter(
    const std::vector<at::Tensor*>& outputs) const {
  for (const at::Tensor* output : outputs) {
    const StorageTag* tag = TagOf(*output);
    if (tag == nullptr || tag->listener != this) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "an output is a parameter of unit ", model_->unit_name(tag->unit),
        " or a view of one, whose memory is about to be freed: return a copy "
        "(.clone())"));
  }
  return absl::OkStatus();
}

void TransparentUnits::AfterPostForward(
    int, const std::vector<at::Tensor*>& outputs) {
  if (!stack_.empty() || InsideBackward()) return;
  for (const at::Tensor* output : outputs) {
    if (!output->defined() || !HasOurEdge(*output)) continue;
    graphs_.push_back(output->grad_fn());
    break;
  }
  ObserveAsLongAsNeeded();
}

// Autograd's engine hands the callbacks that a thread has when backward begins
// on to the threads that run it; inside backward it is too late to add them.
void TransparentUnits::ObserveAsLongAsNeeded() {
  DropExpired(graphs_);
  if (stack_.empty() && graphs_.empty()) observer_.reset();
}

// --- Operators --------------------------------------------------------------

void TransparentUnits::OnOperator(absl::Span<const int> units, bool nested) {
  if (acting_) return;
  absl::Status status = InsideBackward() ? OnBackwardOperator(units, nested)
                                         : OnForwardOperator(units, nested);
  if (!status.ok()) Fail(status);
}

absl::Status TransparentUnits::OnForwardOperator(absl::Span<const int> units,
                                                 bool nested) {
  // Between steps there is nothing to do: the storage raises its own error.
  if (stack_.empty()) return absl::OkStatus();
  if (thread_ != std::this_thread::get_id()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "an operator takes a parameter of unit ",
        model_->unit_name(units.front()),
        " on another thread than that of the forward: the unit may be freed "
        "while it runs, and collectives need one order. Run the forward of a "
        "sharded model on one thread"));
  }
  absl::InlinedVector<int, 4> missing;
  for (int unit : units) {
    if (units_[unit].forwards == 0) missing.push_back(unit);
  }
  if (missing.empty()) return absl::OkStatus();
  std::sort(missing.begin(), missing.end());
  const Acting acting(this);
  // An operator around this one may be in the middle of reading.
  if (!nested) FSDP_RETURN_IF_ERROR(CloseUnlessAround(units));
  for (int unit : missing) {
    if (units_[unit].forwards == 0) FSDP_RETURN_IF_ERROR(OpenUnit(unit));
  }
  return absl::OkStatus();
}

// The graph of a forward may begin after its first operator, which runs under a
// NoGradGuard for example: the unit gets its node at once.
absl::Status TransparentUnits::OpenUnit(int unit) {
  if (model_->CastsInputs(unit)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "unit ", model_->unit_name(unit),
        " is to cast its inputs, but its module was called directly: nobody "
        "sees the inputs. Call it by fsdp::Forward(child, ...), or let only "
        "the root cast"));
  }
  const at::AutoGradMode grad(records_graph_ || at::GradMode::is_enabled());
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
  while (!stack_.empty() && stack_.back().is_transparent &&
         !IsAround(stack_.back().unit, units)) {
    FSDP_RETURN_IF_ERROR(CloseInnermost());
  }
  return absl::OkStatus();
}

// --- Backward ---------------------------------------------------------------

absl::Status TransparentUnits::OnBackwardOperator(absl::Span<const int> units,
                                                  bool nested) {
  // One that threw has not told of its end.
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
  PreBackwardInfo info{unit, CurrentSequence(), false, 0};
  // The use this operator belongs to is the last one that began before it.
  for (const std::weak_ptr<Node>& weak : state.nodes) {
    const std::shared_ptr<Node> node = weak.lock();
    if (node == nullptr || node->sequence_nr() > info.exit_sequence) continue;
    info.has_unit_node = true;
    info.unit_node_sequence = node->sequence_nr();
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

// As the Exit node of a unit does for the one unit it knows.
absl::Status TransparentUnits::CheckNotCaptured() const {
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
