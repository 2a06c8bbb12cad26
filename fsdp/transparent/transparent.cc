// Units without fsdp::Forward: the operators that run tell when a unit of an
// unmodified model begins and ends its forward and its backward.
//
// While a forward of the root is under way, the first operator that takes a
// unit's parameter, or a view of one, begins the unit's forward: the unit is
// gathered and gets a new Unit node before the operator looks at the parameter.
// The forward ends when an operator takes a parameter of a unit that is not
// inside this one, or with the forward around it. What comes later is a new
// use, with its own gather, node and reduction.
//
// Nothing tells a unit's output from other tensors, so there are no exits:
// backward gathers a unit when an operator takes its parameter, or never if
// none does. Its Unit node ends the backward; the backward of a unit with
// nothing trainable ends as its forward does.
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/autograd_node.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/transparent/op_observer.h"

namespace fsdp {
namespace {

using ::torch::autograd::Node;

template <typename T, typename Predicate>
void EraseIf(std::vector<T>& values, Predicate predicate) {
  values.erase(std::remove_if(values.begin(), values.end(), predicate),
               values.end());
}

// The node of one use of a unit, and whether that was in full precision.
struct UseNode {
  bool expired() const { return node.expired(); }

  WeakNodePtr node;
  bool in_full_precision;
};

template <typename Nodes>
void DropExpired(Nodes& nodes) {
  EraseIf(nodes, [](const auto& node) { return node.expired(); });
}

// Returns the sequence number of the node that backward runs. Nodes with higher
// numbers have run or never will, except for leaves', whose number is the
// highest and says nothing.
uint64_t CurrentSequence() {
  const NodePtr node = torch::autograd::get_current_node();
  constexpr uint64_t kNoneHigher = UINT64_MAX - 1;
  return node == nullptr ? kNoneHigher
                         : std::min<uint64_t>(node->sequence_nr(), kNoneHigher);
}

// Adds the events of one model's transparent uses to those that fsdp::Forward
// and autograd report. Errors cannot leave an operator's callback, so the next
// event or TakeFailure() returns them. An operator that needs memory that is
// not there fails itself.
class TransparentUnits final : public UnitObserver, private OpListener {
 public:
  explicit TransparentUnits(ShardedModel* model)
      : model_(model), units_(model->num_units()), tags_(*model, this) {}

  absl::Status BeforePreForward(int unit) override {
    if (acting_) return absl::OkStatus();
    if (stack_.empty() && !InsideBackward()) return Begin();
    EnterRecomputation();
    FSDP_RETURN_IF_ERROR(Failure());
    return CloseUnlessAround({unit});
  }

  void AfterPreForward(int unit) override {
    stack_.push_back({unit, acting_, /*expects_backward=*/false});
    ++units_[unit].forwards;
    in_forward_ = true;
  }

  absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) override {
    if (!acting_) {
      FSDP_RETURN_IF_ERROR(Failure());
      // Looks for parameters of any unit: those inside end with this one at the
      // latest.
      for (const at::Tensor* output : outputs) {
        const StorageTag* tag = TagOf(*output);
        if (tag == nullptr || tag->listener != this) continue;
        return absl::FailedPreconditionError(absl::StrCat(
            "an output is a parameter of unit ", model_->unit_name(tag->unit),
            " or a view of one, whose memory is about to be freed: return a "
            "copy (.clone())"));
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

  void AfterPostForward(int, const std::vector<NodePtr>& exits) override {
    if (!stack_.empty() || InsideBackward()) return;
    graphs_.insert(graphs_.end(), exits.begin(), exits.end());
    ObserveAsLongAsNeeded();
  }

  absl::Status BeforePreBackward(int unit) override {
    FSDP_RETURN_IF_ERROR(Failure());
    FSDP_RETURN_IF_ERROR(CheckNotCaptured());
    if (!acting_) {
      const Acting acting(this);
      FSDP_RETURN_IF_ERROR(EndFrozenUnlessRelatedTo({unit}));
      if (!torch::autograd::get_current_graph_task_keep_graph()) {
        const NodePtr exit = torch::autograd::get_current_node();
        EraseIf(graphs_, [&](const auto& p) { return p.lock() == exit; });
      }
    }
    units_[unit].in_backward = true;
    return absl::OkStatus();
  }

  absl::Status BeforePostBackward(int unit) override {
    FSDP_RETURN_IF_ERROR(Failure());
    if (!acting_) {
      FSDP_RETURN_IF_ERROR(CheckRecordsNoGraph(model_->unit_name(unit)));
    }
    units_[unit].in_backward = false;
    EraseIf(frozen_, [unit](int frozen) { return frozen == unit; });
    return absl::OkStatus();
  }

  absl::Status BeforeEndOfBackward() override {
    ForgetBackward();
    for (UnitState& state : units_) {
      if (state.used) state.was_read_by_backward = state.read_by_backward;
      state.used = state.read_by_backward = false;
    }
    ObserveAsLongAsNeeded();
    return Failure();
  }

  void OnGivenUp() override {
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

  absl::Status TakeFailure() override {
    absl::MutexLock lock(&mutex_);
    return std::exchange(failure_, absl::OkStatus());
  }

 private:
  struct OpenForward {
    int unit;
    bool is_transparent;
    bool expects_backward;  // a transparent one's, by its graph
  };
  struct UnitState {
    int forwards = 0;          // entries of stack_
    bool in_backward = false;  // between PreBackward and PostBackward
    bool is_frozen = false;    // in its last transparent use with a graph
    // Whether transparent uses with a graph were in full precision: from which
    // sequence number of autograd on, at each change.
    std::vector<std::pair<uint64_t, bool>> modes;
    // Nodes of transparent uses whose graph lives, the oldest first.
    std::vector<UseNode> nodes;
    // A frozen unit was used in this iteration, and then read by backward in
    // this one and in the one before.
    bool used = false;
    bool read_by_backward = false;
    bool was_read_by_backward = true;
  };
  // While one lives, events are ours and operators are the library's own.
  class Acting {
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

  // --- Operators ---
  void OnOperator(absl::Span<const int> units, bool nested) override {
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

  void OnWrite(const at::Tensor& tensor, int unit) override {
    if (in_forward_ && !acting_ && !InsideBackward()) {
      Fail(model_->RefuseWrite(unit, tensor));
    }
  }

  absl::Status CheckThread(int unit) const {
    if (thread_ == std::this_thread::get_id()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "an operator takes a parameter of unit ", model_->unit_name(unit),
        " on another thread than that of the forward: the unit may be freed "
        "while it runs, and collectives need one order. Run the forward of a "
        "sharded model on one thread"));
  }

  absl::Status OnForwardOperator(absl::Span<const int> units, bool nested) {
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

  absl::Status OnBackwardOperator(absl::Span<const int> units, bool nested) {
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

  // --- Forwards ---
  absl::Status Begin() {
    TakeFailure().IgnoreError();
    // Operators on a parameter with foreign memory would not be seen.
    FSDP_RETURN_IF_ERROR(model_->CheckBinding());
    records_graph_ = at::GradMode::is_enabled();
    thread_ = std::this_thread::get_id();
    observer_.emplace();
    return absl::OkStatus();
  }

  // The engine passes a thread's callbacks on when backward begins, to the
  // threads that run it; inside backward it is too late to add them.
  void ObserveAsLongAsNeeded() {
    DropExpired(graphs_);
    if (stack_.empty() && graphs_.empty()) observer_.reset();
  }

  bool IsAround(int unit, absl::Span<const int> inner_units) const {
    return absl::c_any_of(inner_units, [&](int inner) {
      return inner == unit || model_->schedule().IsAncestor(unit, inner);
    });
  }

  // The unit gets its node at once: the graph of its forward may begin only
  // after its first operator, which may run under a NoGradGuard.
  absl::Status OpenUnit(int unit) {
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
          "but its module was called directly: nobody can call it again. "
          "Call it by fsdp::Forward(child, ...), or put the call into "
          "fsdp::Checkpoint() and leave the unit out of "
          "Options::recompute.units"));
    }
    FSDP_RETURN_IF_ERROR(model_->PreForward(unit));
    if (!at::GradMode::is_enabled()) return absl::OkStatus();
    UnitState& state = units_[unit];
    const bool full = model_->precision().InFullPrecision(unit);
    if (state.modes.empty() || state.modes.back().second != full) {
      state.modes.emplace_back(at::sequence_number::peek(), full);
    }
    const NodePtr& node = model_->forward_node(unit);
    state.is_frozen = node == nullptr;
    state.used = true;
    stack_.back().expects_backward =
        !state.is_frozen || state.was_read_by_backward;
    if (state.is_frozen) return absl::OkStatus();
    DropExpired(state.nodes);
    state.nodes.push_back({node, full});
    return absl::OkStatus();
  }

  absl::Status CloseInnermost() {
    const Acting acting(this);
    const OpenForward innermost = stack_.back();
    return model_->PostForwardOfUnseen(innermost.unit,
                                       innermost.expects_backward);
  }

  absl::Status CloseUnlessAround(absl::Span<const int> units) {
    while (stack_.size() > outer_forwards_ && stack_.back().is_transparent &&
           !IsAround(stack_.back().unit, units)) {
      FSDP_RETURN_IF_ERROR(CloseInnermost());
    }
    return absl::OkStatus();
  }

  // A recomputation is a forward inside backward: its units get nodes of their
  // own, which the region's nested backward runs. They end with it.
  void EnterRecomputation() {
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

  // --- Backward ---
  absl::Status BeginBackward(int unit) {
    UnitState& state = units_[unit];
    state.read_by_backward = true;
    PreBackwardInfo info{unit, CurrentSequence(), std::nullopt, false};
    // The operator belongs to the last use that began before it.
    for (const auto& [since, full] : state.modes) {
      if (since <= info.exit_sequence) info.in_full_precision = full;
    }
    for (const UseNode& use : state.nodes) {
      const NodePtr node = use.node.lock();
      if (node == nullptr || node->sequence_nr() > info.exit_sequence) continue;
      info.in_full_precision = use.in_full_precision;
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

  void ForgetBackward() {
    for (UnitState& state : units_) state.in_backward = false;
    frozen_.clear();
  }

  absl::Status EndFrozenUnlessRelatedTo(absl::Span<const int> units) {
    const std::vector<int> frozen = frozen_;
    const uint64_t sequence = CurrentSequence();
    for (int unit : frozen) {
      const bool is_inside = absl::c_any_of(units, [&](int other) {
        return model_->schedule().IsAncestor(other, unit);
      });
      if (is_inside || IsAround(unit, units)) continue;
      FSDP_RETURN_IF_ERROR(TorchToStatus(
          absl::StrCat("the backward of unit ", model_->unit_name(unit)), [&] {
            model_->OnPostBackward({unit, sequence}, {});
          }));
    }
    return absl::OkStatus();
  }

  // The exits of a unit check this only for that unit.
  absl::Status CheckNotCaptured() const {
    const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
    if (exec_info == nullptr || exec_info->empty()) return absl::OkStatus();
    for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
      for (const UseNode& use : units_[unit].nodes) {
        FSDP_RETURN_IF_ERROR(CheckComputesNoGradientOf(
            use.node.lock(), model_->unit_name(unit)));
      }
    }
    return absl::OkStatus();
  }

  // --- Failures ---
  void Fail(const absl::Status& status) {
    absl::MutexLock lock(&mutex_);
    failure_.Update(status);
  }

  absl::Status Failure() const {
    absl::MutexLock lock(&mutex_);
    return failure_;
  }

  ShardedModel* const model_;
  std::vector<UnitState> units_;
  std::vector<OpenForward> stack_;  // forwards under way, the innermost last
  // The recomputation under way in which units have run, and how many forwards
  // of stack_ are around it.
  const RecomputeScope* recomputation_ = nullptr;
  size_t outer_forwards_ = 0;
  // Frozen units whose backward an operator has begun.
  std::vector<int> frozen_;
  // Exits of root forwards for which a backward may still come.
  std::vector<WeakNodePtr> graphs_;
  std::optional<OpObserver> observer_;
  bool acting_ = false;                  // the present event is ours
  bool records_graph_ = false;           // of the outermost forward
  std::thread::id thread_;               // of the outermost forward
  std::atomic<bool> in_forward_{false};  // stack_ is not empty
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  const ModelTags tags_;
};

}  // namespace

std::unique_ptr<UnitObserver> MakeTransparentUnits(ShardedModel* model) {
  return std::make_unique<TransparentUnits>(model);
}

}  // namespace fsdp
