#include "fsdp/model/sharded_model.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/autograd/parameter_hooks.h"
#include "fsdp/model/parameter_owner.h"

namespace fsdp {
namespace {

// What gathering the unit takes, and what reducing its gradients: for
// fsdp/trace.
std::array<c10::IValue, 2> BytesOf(const Runtime& runtime, int unit) {
  int64_t unsharded = 0;
  for (const auto& flat : runtime.flats(unit)) {
    unsharded += flat->unsharded_bytes();
  }
  return {unsharded, runtime.reduce_buffer_bytes(unit)};
}

// Tied parameters may differ in this.
bool AnyTrainable(const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& t) { return t.requires_grad(); });
}

}  // namespace

ShardedModel::ShardedModel(std::unique_ptr<Runtime> runtime, Schedule schedule,
                           Settings settings)
    : runtime_(std::move(runtime)),
      schedule_(std::move(schedule)),
      settings_(std::move(settings)),
      owner_(std::make_shared<ParameterOwner>()),
      units_(runtime_->num_units()) {
  for (int unit = 0; unit < runtime_->num_units(); ++unit) {
    units_[unit].first_shard = named_shards_.size();
    units_[unit].buffers = std::make_shared<const std::vector<at::Tensor>>(
        std::move(settings_.unit_buffers[unit]));
    const auto& replicate = runtime_->placement(unit).replicate;
    const int replicas = replicate == nullptr ? 1 : replicate->world_size();
    for (const auto& flat : runtime_->flats(unit)) {
      for (int i = 0; i < flat->num_parameters(); ++i) {
        const flat_param::NamedParameter& parameter = flat->parameter(i);
        const at::Tensor& first = parameter.tensors.front();
        for (const at::Tensor& tensor : parameter.tensors) {
          SetOwner(tensor, parameter.name, owner_);
        }
        units_[unit].slots.push_back({parameter.name, parameter.tensors,
                                      flat->ShardSlice(i),
                                      MakeSentinel(first, parameter.name)});
        named_shards_.push_back(
            {parameter.name, first.sizes().vec(), flat->ShardSlice(i),
             flat->layout().InParameter(i, flat->rank()).begin, replicas});
      }
    }
  }
  AttachSentinels();
  SeeVersions();
  settings_.buffers.Cast();
}

void ShardedModel::SetModules(
    const std::vector<std::pair<std::shared_ptr<torch::nn::Module>, int>>&
        modules) {
  owner_->set_model(weak_from_this());
  for (const auto& [module, unit] : modules) {
    const auto [place, is_new] =
        modules_.try_emplace(module.get(), ModulePlace{module, unit});
    // One that is registered twice is a unit where it is met first.
    if (!is_new && unit != kNoUnit) place->second.unit = unit;
  }
}

std::optional<int> ShardedModel::UnitOf(const torch::nn::Module& module) const {
  const auto found = modules_.find(&module);
  // Another module may have come to lie where one of ours was.
  if (found == modules_.end() || found->second.module.expired()) {
    return std::nullopt;
  }
  return found->second.unit;
}

void ShardedModel::ClearEdges() {
  for (const UnitState& state : units_) {
    for (const Slot& slot : state.slots) {
      for (const at::Tensor& tensor : slot.tensors) ClearEdge(tensor);
    }
  }
}

// Takes requires_grad from the module's tensors, which have no edges.
void ShardedModel::AttachSentinels() {
  for (UnitState& state : units_) {
    for (Slot& slot : state.slots) {
      slot.shard.set_requires_grad(AnyTrainable(slot.tensors));
      for (const at::Tensor& tensor : slot.tensors) {
        if (tensor.requires_grad()) AttachSentinel(tensor, slot.sentinel);
      }
    }
  }
}

void ShardedModel::RestoreSentinels() {
  for (UnitState& state : units_) {
    // A backward inside a forward ends while the units around it still run.
    if (!state.edges_attached || state.node != nullptr) continue;
    state.edges_attached = false;
    for (const Slot& slot : state.slots) {
      if (!slot.shard.requires_grad()) continue;
      for (const at::Tensor& tensor : slot.tensors) {
        if (tensor.requires_grad()) AttachSentinel(tensor, slot.sentinel);
      }
    }
  }
}

ShardedModel::~ShardedModel() { runtime_->DropEverything(); }

void ShardedModel::SetObserver(std::unique_ptr<UnitObserver> observer) {
  observer_ = std::move(observer);
}

absl::Status ShardedModel::TakeFailure() {
  return observer_ == nullptr ? absl::OkStatus() : observer_->TakeFailure();
}

absl::Status ShardedModel::CheckThread(int unit) const {
  if (!schedule_.in_forward() || InsideBackward() ||
      forward_thread_ == std::this_thread::get_id()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "forward of unit ", unit_name(unit),
      " on another thread than its root's: collectives need one order. Run "
      "one forward of a sharded model at a time, on one thread"));
}

absl::Status ShardedModel::PreForward(int unit) {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  FSDP_RETURN_IF_ERROR(CheckThread(unit));
  if (unit == kRoot && schedule_.in_forward() && !InsideBackward()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "forward of the root ", unit_name(unit), " inside its own forward"));
  }
  const bool recomputes = InsideBackward();
  if (recomputes) {
    EnterBackward();
    const auto node = torch::autograd::get_current_node();
    FSDP_RETURN_IF_ERROR(
        FinishPendingFrom(node == nullptr ? 0 : node->sequence_nr() + 1));
  } else if (schedule_.in_backward()) {
    GiveUpStaleBackward();
  }
  if (observer_ != nullptr) {
    FSDP_RETURN_IF_ERROR(observer_->BeforePreForward(unit));
  }
  if (!schedule_.in_forward()) {
    forward_thread_ = std::this_thread::get_id();
    if (!recomputes) {
      FSDP_RETURN_IF_ERROR(ChoosePrecision());
      for (int each = 0; each < num_units(); ++each) NoteWrittenShards(each);
    }
  }
  for (const auto& flat : runtime_->flats(unit)) {
    FSDP_RETURN_IF_ERROR(flat->CheckBinding());
  }
  const absl::Status unwritten = CheckUnwrittenBetweenForwards(unit);
  if (!unwritten.ok()) {
    GiveUpIteration(unwritten);
    return unwritten;
  }
  NoteWrittenShards(unit);  // also what was written inside the forward
  const bool records_graph = c10::GradMode::is_enabled();
  // A region that runs without grad is recomputed with it.
  if (records_graph || RegionScope::Current() != nullptr) {
    FSDP_RETURN_IF_ERROR(CheckHeldIsCurrent(unit));
  }
  if (records_graph) FSDP_RETURN_IF_ERROR(CheckHooks(unit));
  Event event{EventKind::kPreForward, unit};
  event.records_graph = records_graph;
  event.recomputes = recomputes;
  FSDP_RETURN_IF_ERROR(TransitionOrAbort(event, {}));
  if (records_graph) AttachNode(unit);
  RegionScope* const region = RegionScope::Current();
  if (region != nullptr && HasTrainable(unit)) region->NoteTrainable();
  RecomputeScope* const recomputation = RecomputeScope::Current();
  if (recomputation != nullptr) {
    recomputation->KeepBuffers(*units_[unit].buffers);
  }
  if (observer_ != nullptr) observer_->AfterPreForward(unit);
  return absl::OkStatus();
}

// A hook that never ran would be a wrong gradient without a word.
absl::Status ShardedModel::CheckHooks(int unit) const {
  for (const Slot& slot : units_[unit].slots) {
    if (HasTensorHooks(slot.shard) || HasPostAccumulateHooks(slot.shard)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "a hook on the shard of ", slot.name,
          " in Parameters() would not run: register it on the module's "
          "parameter, where it gets the whole gradient of this rank, or use "
          "StepInBackward()"));
    }
    for (const at::Tensor& tensor : slot.tensors) {
      if (!HasPostAccumulateHooks(tensor)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "a post-accumulate-grad hook on parameter ", slot.name,
          " would not run: the gradient of a sharded parameter is in .grad of "
          "its shard. Use StepInBackward()"));
    }
  }
  return absl::OkStatus();
}

// requires_grad is read again at every forward: a parameter may be frozen and
// unfrozen between steps.
void ShardedModel::AttachNode(int unit) {
  UnitState& state = units_[unit];
  auto running = std::make_shared<RunningUnit>();
  running->name = unit_name(unit);
  running->may_use_other_parameters = settings_.ignores_parameters;
  running->buffers = state.buffers;
  ParameterSlots& trainable = running->trainable;
  trainable.resize(state.slots.size());
  state.num_trainable = 0;
  for (size_t k = 0; k < state.slots.size(); ++k) {
    Slot& slot = state.slots[k];
    for (const at::Tensor& tensor : slot.tensors) ClearEdge(tensor);
    for (const at::Tensor& tensor : slot.tensors) {
      if (tensor.requires_grad()) trainable[k].push_back(tensor);
    }
    const bool requires_grad = !trainable[k].empty();
    if (slot.shard.requires_grad() != requires_grad) {
      slot.shard.set_requires_grad(requires_grad);
    }
    if (requires_grad) ++state.num_trainable;
  }
  state.running = running;
  state.start_sequence = at::sequence_number::peek();
  state.node.reset();
  if (state.num_trainable == 0) return;
  state.node =
      AttachUnitNode(weak_from_this(), unit, unit_name(unit), trainable);
  state.edges_attached = true;
}

bool ShardedModel::HasTrainable(int unit) const {
  const std::vector<Slot>& slots = units_[unit].slots;
  return std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
    return AnyTrainable(slot.tensors);
  });
}

void ShardedModel::WatchInput(int unit, const at::Tensor& input) {
  const UnitState& state = units_[unit];
  if (state.num_trainable > 0) return;
  AttachEntry(weak_from_this(), state.start_sequence, input);
}

absl::Status ShardedModel::CheckForwardLeftParametersAlone(
    int unit, const std::vector<at::Tensor*>& outputs) const {
  for (const Slot& slot : units_[unit].slots) {
    if (slot.tensors.front()._version() == slot.version) continue;
    return Modified(unit, slot);
  }
  for (const auto& flat : runtime_->flats(unit)) {
    FSDP_RETURN_IF_ERROR(flat->CheckBinding());
    for (const at::Tensor* output : outputs) {
      if (!output->defined() || !flat->Owns(*output)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "an output of unit ", unit_name(unit),
          " is a parameter or a view of one, whose memory is about to be "
          "freed: return a copy (.clone())"));
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedModel::PostForward(int unit,
                                       const std::vector<at::Tensor*>& outputs,
                                       const SeenTensors& inputs) {
  FSDP_RETURN_IF_ERROR(BeforePostForward(unit, outputs));
  CastOutputs(unit, outputs);
  bool expects_backward = false;
  Nodes exits;
  if (c10::GradMode::is_enabled()) {
    const UnitState& state = units_[unit];
    exits =
        AttachExits(weak_from_this(),
                    {unit, unit_name(unit), state.start_sequence, state.node},
                    outputs, inputs);
    expects_backward = !exits.empty();
  } else if (const RegionScope* region = RegionScope::Current()) {
    // The forward that the backward belongs to is still to come.
    expects_backward = region->passes_grad();
  }
  return EndForward(unit, expects_backward, exits);
}

absl::Status ShardedModel::PostForwardOfUnseen(int unit,
                                               bool expects_backward) {
  FSDP_RETURN_IF_ERROR(BeforePostForward(unit, {}));
  return EndForward(unit, expects_backward, {});
}

absl::Status ShardedModel::BeforePostForward(
    int unit, const std::vector<at::Tensor*>& outputs) {
  absl::Status status;
  if (observer_ != nullptr)
    status = observer_->BeforePostForward(unit, outputs);
  if (status.ok()) status = CheckForwardLeftParametersAlone(unit, outputs);
  if (!status.ok()) GiveUpIteration(status);
  return status;
}

absl::Status ShardedModel::EndForward(int unit, bool expects_backward,
                                      const Nodes& exits) {
  units_[unit].node.reset();
  units_[unit].running.reset();
  Event event{EventKind::kPostForward, unit};
  event.recomputes = InsideBackward();
  event.expects_backward = expects_backward;
  FSDP_RETURN_IF_ERROR(TransitionOrAbort(event, {}));
  if (observer_ != nullptr) observer_->AfterPostForward(unit, exits);
  return absl::OkStatus();
}

void ShardedModel::AbandonForward(int unit, const absl::Status& thrown) {
  GiveUpIteration(absl::AbortedError(
      absl::StrCat("the forward of unit ", unit_name(unit), " on rank ",
                   runtime_->communicator().rank(), " threw an exception",
                   thrown.ok() ? "" : ": ", thrown.message())));
}

absl::Status ShardedModel::TransitionOrAbort(
    const Event& event, const std::vector<at::Tensor>& gradients) {
  RECORD_USER_SCOPE_WITH_INPUTS(
      absl::StrCat("fsdp::", Name(event.kind), "(", unit_name(event.unit), ")"),
      BytesOf(*runtime_, event.unit));
  absl::StatusOr<Actions> actions = schedule_.Next(event);
  absl::Status status = actions.status();
  if (status.ok()) status = runtime_->Execute(*actions, gradients);
  // A refused event has changed nothing; only inside an iteration is there one
  // to give up.
  if (!actions.ok() && !schedule_.in_forward()) return status;
  if (!status.ok()) GiveUpIteration(status);
  return status;
}

// Between Unshard() and here an optimizer may have stepped. Backward gathers
// anew, so that a graph would be of two sets of values.
absl::Status ShardedModel::CheckHeldIsCurrent(int unit) const {
  if (!schedule_.IsHeldForUser(unit) || !runtime_->HoldsCopy(unit) ||
      units_[unit].versions_asked_for == ShardVersions(unit)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "forward with grad of unit ", unit_name(unit),
      ", whose shards were written after Unshard() had gathered it: forward "
      "would compute with the old values and backward with the new ones. "
      "Reshard() it after writing, or Unshard() it then"));
}

// A backward that threw has left the engine without its last callback. What it
// has left in flight is not for gradients that the user may have dropped since.
void ShardedModel::GiveUpStaleBackward() {
  if (!schedule_.in_backward()) return;
  GiveUpIteration(absl::OkStatus(), InFlight::kDrop);
}

// `reason` OK: there is nobody to tell.
void ShardedModel::GiveUpIteration(const absl::Status& reason,
                                   InFlight reductions) {
  RECORD_USER_SCOPE(absl::StrCat("fsdp::", Name(EventKind::kReset), "(",
                                 unit_name(kRoot), ")"));
  if (!reason.ok() && settings_.abort_on_failure && !captures_) {
    runtime_->Abort(reason);
  }
  // The runtime drops everything, so the schedule's own clean-up is not needed.
  schedule_.Next({EventKind::kReset}).IgnoreError();
  if (reductions == InFlight::kFinish)
    runtime_->FinishReductions(
        [this](int unit) { return schedule_.all_reduces(unit); });
  runtime_->DropEverything();
  for (int unit = 0; unit < num_units(); ++unit) {
    schedule_.SetKept(unit, runtime_->HasWholeGradients(unit),
                      runtime_->HasSums(unit));
  }
  order_check_.reset();
  ForgetBackward();
  for (UnitState& state : units_) {
    state.node.reset();
    state.running.reset();
  }
  RestoreSentinels();
  SeeVersions();
  if (observer_ != nullptr) observer_->OnGivenUp();
}

absl::Status ShardedModel::ReleaseUnsharded() {
  return TransitionOrAbort({EventKind::kRelease}, {});
}

}  // namespace fsdp
