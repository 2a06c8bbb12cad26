#include "fsdp/sharded_model.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/work.h"
#include "flat_param/flat_parameter.h"

namespace fsdp {
namespace {

constexpr int kRoot = 0;

int GraphTask() { return torch::autograd::get_current_graph_task_id(); }

bool InsideBackward() { return GraphTask() != -1; }

// Whether this backward computes all gradients rather than chosen ones.
bool BackwardComputesEverything() {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  return exec_info == nullptr || exec_info->empty();
}

// A parameter that was meant to be tied and is not, for example.
void WarnOfMissingGradients(const std::vector<NamedShard>& shards) {
  std::vector<absl::string_view> names;
  for (const NamedShard& named : shards) {
    if (named.shard.requires_grad() && !named.shard.grad().defined()) {
      names.push_back(named.name);
    }
  }
  if (names.empty()) return;
  TORCH_WARN(
      "fsdp: no rank has used these parameters in the first step, so ",
      "they have no gradient and are not trained: ", absl::StrJoin(names, ", "),
      ". Freeze them if that is meant; tie parameters by fsdp::Tie()");
}

}  // namespace

ShardedModel::ShardedModel(std::unique_ptr<Runtime> runtime, Schedule schedule,
                           Settings settings)
    : runtime_(std::move(runtime)),
      schedule_(std::move(schedule)),
      settings_(std::move(settings)),
      units_(runtime_->num_units()) {
  for (int unit = 0; unit < runtime_->num_units(); ++unit) {
    units_[unit].first_shard = named_shards_.size();
    const auto& replicate = runtime_->placement(unit).replicate;
    const int replicas = replicate == nullptr ? 1 : replicate->world_size();
    for (const auto& flat : runtime_->flats(unit)) {
      for (int i = 0; i < flat->num_parameters(); ++i) {
        const flat_param::NamedParameter& parameter = flat->parameter(i);
        const at::Tensor& first = parameter.tensors.front();
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
  settings_.buffers.Cast();
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
      const bool trainable = slot.tensors.front().requires_grad();
      slot.shard.set_requires_grad(trainable);
      if (!trainable) continue;
      for (const at::Tensor& tensor : slot.tensors) {
        AttachSentinel(tensor, slot.sentinel);
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
    // A backward that threw has left the engine without its last callback.
    GiveUpIteration(absl::OkStatus());
  }
  if (observer_ != nullptr) {
    FSDP_RETURN_IF_ERROR(observer_->BeforePreForward(unit));
  }
  if (!schedule_.in_forward()) {
    forward_thread_ = std::this_thread::get_id();
    if (!recomputes) FSDP_RETURN_IF_ERROR(ChoosePrecision());
  }
  for (const auto& flat : runtime_->flats(unit)) {
    FSDP_RETURN_IF_ERROR(flat->CheckBinding());
  }
  const bool records_graph = c10::GradMode::is_enabled();
  Event event{EventKind::kPreForward, unit};
  event.records_graph = records_graph;
  event.recomputes = recomputes;
  FSDP_RETURN_IF_ERROR(TransitionOrAbort(event, {}));
  if (records_graph) AttachNode(unit);
  RegionScope* const region = RegionScope::Current();
  if (region != nullptr && HasTrainable(unit)) region->NoteTrainable();
  for (Slot& slot : units_[unit].slots) {
    slot.version = slot.tensors.front()._version();
  }
  if (observer_ != nullptr) observer_->AfterPreForward(unit);
  return absl::OkStatus();
}

// Eval mode may mean full precision. It changes between forwards only, when
// what is still gathered is not of use any more.
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

// requires_grad is read again at every forward: a parameter may be frozen and
// unfrozen between steps.
void ShardedModel::AttachNode(int unit) {
  UnitState& state = units_[unit];
  auto running = std::make_shared<RunningUnit>();
  running->name = unit_name(unit);
  running->may_use_other_parameters = settings_.ignores_parameters;
  ParameterSlots& trainable = running->trainable;
  trainable.resize(state.slots.size());
  state.num_trainable = 0;
  for (size_t k = 0; k < state.slots.size(); ++k) {
    Slot& slot = state.slots[k];
    for (const at::Tensor& tensor : slot.tensors) ClearEdge(tensor);
    const bool requires_grad = slot.tensors.front().requires_grad();
    if (slot.shard.requires_grad() != requires_grad) {
      slot.shard.set_requires_grad(requires_grad);
    }
    if (!requires_grad) continue;
    trainable[k] = slot.tensors;
    ++state.num_trainable;
  }
  state.running = running;
  state.node.reset();
  if (state.num_trainable == 0) return;
  state.node =
      AttachUnitNode(weak_from_this(), unit, unit_name(unit), trainable);
  state.edges_attached = true;
}

bool ShardedModel::HasTrainable(int unit) const {
  const std::vector<Slot>& slots = units_[unit].slots;
  return std::any_of(slots.begin(), slots.end(), [](const Slot& slot) {
    return slot.tensors.front().requires_grad();
  });
}

bool ShardedModel::NeedsEntry(int unit) const {
  return c10::GradMode::is_enabled() && units_[unit].num_trainable == 0;
}

void ShardedModel::AttachEntry(int unit,
                               const std::vector<at::Tensor*>& inputs) {
  AttachEntryNode(weak_from_this(), unit, unit_name(unit), inputs);
}

absl::Status ShardedModel::CheckForwardLeftParametersAlone(
    int unit, const std::vector<at::Tensor*>& outputs) const {
  for (const Slot& slot : units_[unit].slots) {
    if (slot.tensors.front()._version() == slot.version) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter ", slot.name,
        " was modified in place during the forward of "
        "unit ",
        unit_name(unit),
        ": the change would be lost when the unit is freed. Write through "
        "NamedShards() between steps, or compute with a copy"));
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

absl::Status ShardedModel::PostForward(
    int unit, const std::vector<at::Tensor*>& outputs) {
  FSDP_RETURN_IF_ERROR(BeforePostForward(unit, outputs));
  CastOutputs(unit, outputs);
  bool expects_backward = false;
  if (c10::GradMode::is_enabled()) {
    expects_backward = AttachExitNode(weak_from_this(), unit, unit_name(unit),
                                      units_[unit].node, outputs);
  } else if (const RegionScope* region = RegionScope::Current()) {
    // The forward that the backward belongs to is still to come.
    expects_backward = region->passes_grad();
  }
  return EndForward(unit, expects_backward, outputs);
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
                                      const std::vector<at::Tensor*>& outputs) {
  units_[unit].node.reset();
  units_[unit].running.reset();
  Event event{EventKind::kPostForward, unit};
  event.recomputes = InsideBackward();
  event.expects_backward = expects_backward;
  FSDP_RETURN_IF_ERROR(TransitionOrAbort(event, {}));
  if (observer_ != nullptr) observer_->AfterPostForward(unit, outputs);
  return absl::OkStatus();
}

void ShardedModel::AbandonForward(int unit) {
  GiveUpIteration(absl::AbortedError(
      absl::StrCat("the forward of unit ", unit_name(unit), " on rank ",
                   runtime_->communicator().rank(), " threw an exception")));
}

absl::Status ShardedModel::TransitionOrAbort(
    const Event& event, const std::vector<at::Tensor>& gradients) {
  absl::StatusOr<Actions> actions = schedule_.Next(event);
  absl::Status status = actions.status();
  if (status.ok()) status = runtime_->Execute(*actions, gradients);
  // A refused event has changed nothing; only inside an iteration is there one
  // to give up.
  if (!actions.ok() && !schedule_.in_forward()) return status;
  if (!status.ok()) GiveUpIteration(status);
  return status;
}

// `reason` OK: there is nobody to tell.
void ShardedModel::GiveUpIteration(const absl::Status& reason) {
  if (!reason.ok() && settings_.abort_on_failure) {
    runtime_->Abort(reason);
  }
  // The runtime drops everything, so the schedule's own clean-up is not needed.
  schedule_.Next({EventKind::kReset}).IgnoreError();
  runtime_->DropEverything();
  pending_.clear();
  backward_.reset();
  for (UnitState& state : units_) {
    state.node.reset();
    state.running.reset();
  }
  RestoreSentinels();
  if (observer_ != nullptr) observer_->OnGivenUp();
}

absl::Status ShardedModel::ReleaseUnsharded() {
  return TransitionOrAbort({EventKind::kRelease}, {});
}

absl::Status ShardedModel::Backward(const at::Tensor& loss, bool retain_graph) {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    return absl::InvalidArgumentError(
        "Backward() takes a loss of one element that a forward with grad has "
        "produced; this one is undefined, has another size, or does not "
        "require grad");
  }
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  absl::Status status = TorchToStatus("backward", [&] {
    loss.backward(/*gradient=*/{}, /*retain_graph=*/retain_graph);
  });
  // What comes first is the cause of what backward has thrown.
  absl::Status failure = TakeFailure();
  if (!failure.ok()) status = std::move(failure);
  if (!status.ok()) GiveUpIteration(status);
  return status;
}

void ShardedModel::ZeroGrad(bool set_to_none) {
  for (const NamedShard& named : named_shards_) {
    at::Tensor gradient = named.shard.grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      named.shard.mutable_grad().reset();
    } else {
      gradient.zero_();
    }
  }
  schedule_.ForgetWholeGradients();
  runtime_->DropWholeGradients();
}

void ShardedModel::OnPreBackward(const PreBackwardInfo& info) {
  ThrowIfError(CheckNoWholeAccess());
  EnterBackward();
  if (observer_ != nullptr) {
    ThrowIfError(observer_->BeforePreBackward(info.unit));
  }
  ThrowIfError(FinishPendingFrom(info.exit_sequence));
  ThrowIfError(TransitionOrAbort({EventKind::kPreBackward, info.unit}, {}));
  if (info.has_unit_node) {
    pending_.push_back({info.unit, GraphTask(), info.unit_node_sequence});
  }
}

void ShardedModel::OnPostBackward(const PostBackwardInfo& info,
                                  const std::vector<at::Tensor>& gradients) {
  EnterBackward();
  ThrowIfError(FinishPendingFrom(info.node_sequence + 1));
  if (!pending_.empty() && pending_.back().unit == info.unit &&
      pending_.back().node_sequence == info.node_sequence) {
    pending_.pop_back();
  }
  ThrowIfError(
      PostBackward(info.unit, gradients, /*reduces=*/!gradients.empty()));
}

absl::Status ShardedModel::PostBackward(
    int unit, const std::vector<at::Tensor>& gradients, bool reduces) {
  if (observer_ != nullptr) {
    FSDP_RETURN_IF_ERROR(observer_->BeforePostBackward(unit));
  }
  Event event{EventKind::kPostBackward, unit};
  event.reduces = reduces;
  event.synchronizes = synchronizes_;
  return TransitionOrAbort(event, gradients);
}

// Called at every event inside backward. The first one comes from the outermost
// backward: what is nested in a node of ours is announced by it, and a callback
// that is queued in a nested backward runs at the end of that one.
void ShardedModel::EnterBackward() {
  if (!backward_.expired()) return;
  // A backward that threw has left the engine without its last callback.
  if (schedule_.in_backward()) GiveUpIteration(absl::OkStatus());
  auto alive = std::make_shared<char>();
  backward_ = alive;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [alive = std::move(alive), weak = weak_from_this()] {
        std::shared_ptr<BackwardListener> listener = weak.lock();
        if (listener == nullptr) return;
        static_cast<ShardedModel&>(*listener).OnEndOfBackward();
      });
}

// On another rank the unit's parameters may have been used: control flow inside
// a unit may depend on the data. This rank then takes part with zeros, at the
// place in the order of collectives where the other reduces. `sequence` is of
// the backward that runs now; one nested in it that has a pending unit is over.
absl::Status ShardedModel::FinishPendingFrom(uint64_t sequence) {
  const int graph_task = GraphTask();
  while (!pending_.empty() && (pending_.back().graph_task > graph_task ||
                               (pending_.back().graph_task == graph_task &&
                                pending_.back().node_sequence >= sequence))) {
    const int unit = pending_.back().unit;
    pending_.pop_back();
    const std::vector<at::Tensor> none(units_[unit].slots.size());
    FSDP_RETURN_IF_ERROR(
        PostBackward(unit, none, /*reduces=*/BackwardComputesEverything()));
  }
  return absl::OkStatus();
}

void ShardedModel::OnEndOfBackward() {
  backward_.reset();
  ThrowIfError(FinishPendingFrom(0));
  if (observer_ != nullptr) ThrowIfError(observer_->BeforeEndOfBackward());
  Event event{EventKind::kEndOfBackward};
  event.synchronizes = synchronizes_;
  ThrowIfError(TransitionOrAbort(event, {}));
  RestoreSentinels();
  const bool first_step = synchronizes_ && agreed_orders_.empty();
  if (first_step && runtime_->communicator().rank() == 0 &&
      runtime_->hooks().step == nullptr) {
    WarnOfMissingGradients(named_shards_);
  }
  absl::Status status = CheckOrder();
  if (!status.ok()) GiveUpIteration(status);
  ThrowIfError(status);
}

// Where a backend cannot see that ranks' collectives do not match, this can.
// Every reducing backward compares, since a rank whose order is as before does
// not know that another's has changed: sixteen bytes.
absl::Status ShardedModel::CheckOrder() {
  absl::Status status;
  if (!synchronizes_) return status;
  const uint64_t hash = runtime_->OrderHash();
  if (settings_.check_order && runtime_->communicator().world_size() > 1) {
    status = CompareOrder(hash);
  }
  if (status.ok()) agreed_orders_.insert(hash);
  runtime_->ClearOrder();
  return status;
}

absl::Status ShardedModel::CompareOrder(uint64_t hash) {
  constexpr char kWhat[] = "the collectives of an iteration";
  comm::Communicator& world = runtime_->communicator();
  const absl::Time deadline = absl::Now() + runtime_->timeout();
  // The greatest hash and, of complements, the least one.
  const int64_t bits = static_cast<int64_t>(hash);
  const at::Tensor extremes = at::tensor({bits, ~bits}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<comm::Work> work,
                        world.AllReduce(extremes, comm::ReduceOp::kMax, kWhat));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  const int64_t* extreme = extremes.const_data_ptr<int64_t>();
  if (extreme[0] == ~extreme[1]) return absl::OkStatus();
  return comm::CheckSame(world, runtime_->OrderText(), kWhat, deadline);
}

void ShardedModel::RestoreSentinels() {
  for (UnitState& state : units_) {
    if (!state.edges_attached) continue;
    state.edges_attached = false;
    for (const Slot& slot : state.slots) {
      if (!slot.shard.requires_grad()) continue;
      for (const at::Tensor& tensor : slot.tensors) {
        AttachSentinel(tensor, slot.sentinel);
      }
    }
  }
}

absl::Status ShardedModel::SetTrainable(absl::string_view name,
                                        bool trainable) {
  const auto alias = settings_.aliases.find(name);
  if (alias != settings_.aliases.end()) name = alias->second;
  for (UnitState& state : units_) {
    for (Slot& slot : state.slots) {
      if (slot.name != name) continue;
      for (const at::Tensor& tensor : slot.tensors) {
        ClearEdge(tensor);
        tensor.set_requires_grad(trainable);
        if (trainable) AttachSentinel(tensor, slot.sentinel);
      }
      slot.shard.set_requires_grad(trainable);
      if (!trainable) slot.shard.mutable_grad().reset();
      return absl::OkStatus();
    }
  }
  return absl::NotFoundError(
      absl::StrCat("the model has no parameter named ", name));
}

absl::Status ShardedModel::CheckNoWholeAccess() const {
  if (whole_access_.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the model's parameters are whole for ", whole_access_,
                   ": end that before anything else is done with the model"));
}

absl::Status ShardedModel::CheckIdle(absl::string_view what) const {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  if (!schedule_.in_forward() && !InsideBackward()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      what, " inside a forward or backward: call it between steps"));
}

absl::Status ShardedModel::StepInBackward(UnitStep step) {
  FSDP_RETURN_IF_ERROR(CheckIdle("StepInBackward()"));
  RuntimeHooks hooks = runtime_->hooks();
  hooks.step = [this, step = std::move(step)](int unit) {
    const UnitState& state = units_[unit];
    return step(absl::MakeConstSpan(named_shards_)
                    .subspan(state.first_shard, state.slots.size()));
  };
  runtime_->SetHooks(std::move(hooks));
  schedule_.set_step_in_backward(true);
  return absl::OkStatus();
}

absl::Status ShardedModel::SetReductionHooks(ReduceScatterHook reduce_scatter,
                                             AllReduceHook all_reduce) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetReductionHooks()"));
  RuntimeHooks hooks = runtime_->hooks();
  if (hooks.reduce_scatter || hooks.all_reduce) {
    return absl::FailedPreconditionError(
        "this model has reduction hooks already: combine them into one");
  }
  hooks.reduce_scatter = std::move(reduce_scatter);
  hooks.all_reduce = std::move(all_reduce);
  runtime_->SetHooks(std::move(hooks));
  return absl::OkStatus();
}

absl::Status ShardedModel::SetGradientDivideFactors(double before,
                                                    double after) {
  FSDP_RETURN_IF_ERROR(CheckIdle("SetGradientDivideFactors()"));
  if (!(before > 0) || !(after > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients cannot be divided by ", before, " and ", after,
                     ": both factors have to be positive"));
  }
  runtime_->SetGradientScaling({1 / before, 1 / after});
  return absl::OkStatus();
}

absl::Status ShardedModel::BeginWholeAccess(absl::string_view what) {
  FSDP_RETURN_IF_ERROR(CheckIdle(what));
  for (int unit = 0; unit < num_units(); ++unit) {
    for (const auto& flat : runtime_->flats(unit)) {
      FSDP_RETURN_IF_ERROR(flat->CheckBinding());
    }
  }
  // A backward that threw has left the engine without its last callback.
  if (schedule_.in_backward()) GiveUpIteration(absl::OkStatus());
  // Also frees what was kept for a backward that has not come.
  FSDP_RETURN_IF_ERROR(ReleaseUnsharded());
  whole_access_ = std::string(what);
  ClearEdges();
  return absl::OkStatus();
}

void ShardedModel::EndWholeAccess() {
  whole_access_.clear();
  AttachSentinels();
}

absl::Status ShardedModel::Unshard(int unit) {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  return TransitionOrAbort({EventKind::kUnshard, unit}, {});
}

absl::Status ShardedModel::WaitUnshard(int unit) {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  return TransitionOrAbort({EventKind::kWaitUnshard, unit}, {});
}

absl::Status ShardedModel::Reshard(int unit) {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  return TransitionOrAbort({EventKind::kReshard, unit}, {});
}

}  // namespace fsdp
