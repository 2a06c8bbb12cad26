// The forward of ShardedModel, event by event.
#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

absl::Status ShardedModel::PreForward(int unit) {
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  const bool recomputes = InsideBackward();
  if (schedule_.in_forward() && !recomputes) {
    if (forward_thread_ != std::this_thread::get_id()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "forward of unit ", unit_name(unit),
          " on another thread than its root's: collectives need one order. Run "
          "one forward of a sharded model at a time, on one thread"));
    }
    if (unit == kRoot) {
      return absl::FailedPreconditionError(absl::StrCat(
          "forward of the root ", unit_name(unit), " inside its own forward"));
    }
  }
  FSDP_RETURN_IF_ERROR(BeginForward(unit, recomputes));
  const bool records_graph = c10::GradMode::is_enabled();
  FSDP_RETURN_IF_ERROR(CheckParameters(unit, records_graph));
  Event event{EventKind::kPreForward, unit};
  event.records_graph = records_graph;
  event.recomputes = recomputes;
  FSDP_RETURN_IF_ERROR(TransitionOrGiveUp(event, {}));
  if (records_graph) AttachNode(unit);
  RegionScope* const region = RegionScope::Current();
  if (region != nullptr && units_[unit].parameters.AnyTrainable()) {
    region->NoteTrainable();
  }
  RecomputeScope* const recomputation = RecomputeScope::Current();
  if (recomputation != nullptr) {
    recomputation->KeepBuffers(*units_[unit].buffers);
  }
  if (observer_ != nullptr) observer_->AfterPreForward(unit);
  return absl::OkStatus();
}

// Ends what came before: uses of units that this backward has left, or a
// backward whose end was not reported.
absl::Status ShardedModel::BeginForward(int unit, bool recomputes) {
  if (recomputes) {
    EnterBackward();
    const auto node = torch::autograd::get_current_node();
    FSDP_RETURN_IF_ERROR(
        FinishPendingFrom(node == nullptr ? 0 : node->sequence_nr() + 1));
  } else {
    GiveUpStaleBackward();
  }
  if (observer_ != nullptr) {
    FSDP_RETURN_IF_ERROR(observer_->BeforePreForward(unit));
  }
  if (schedule_.in_forward()) return absl::OkStatus();
  forward_thread_ = std::this_thread::get_id();
  if (recomputes) return absl::OkStatus();
  if (!captures_) runtime_->DropUnusedGradients();
  absl::Status loaded = CheckLoaded();
  if (!loaded.ok()) {
    GiveUpIteration(loaded);
    return loaded;
  }
  // What is gathered has the precision of the last mode.
  FSDP_RETURN_IF_ERROR(precision_.FollowMode(
      [this](absl::Span<const int> units, bool full) -> absl::Status {
        FSDP_RETURN_IF_ERROR(ReleaseUnsharded());
        for (const int each : units) {
          runtime_->SetPrecision(each, full ? flat_param::Precision::kFull
                                            : flat_param::Precision::kCompute);
        }
        return absl::OkStatus();
      }));
  for (int each = 0; each < num_units(); ++each) {
    NoteWrittenShards(each);
    if (!units_[each].written_while_kept || !runtime_->HoldsCopy(each)) {
      continue;
    }
    absl::Status stale = absl::FailedPreconditionError(absl::StrCat(
        "forward of unit ", unit_name(each),
        ", which stays gathered over a backward under NoSync(), and whose "
        "shards were written since: it would compute with the old values. "
        "Write shards, by an optimizer or by WeightAverage::InModel() for "
        "example, after the backward that synchronizes"));
    GiveUpIteration(stale);
    return stale;
  }
  NoteEndOfStep();
  return absl::OkStatus();
}

bool ShardedModel::NoteWrittenShards(int unit) {
  UnitState& state = units_[unit];
  const bool written = state.parameters.NoteWrittenShards();
  state.written_while_kept =
      schedule_.IsKept(unit) && (written || state.written_while_kept);
  return written;
}

absl::Status ShardedModel::CheckParameters(int unit, bool records_graph) {
  for (const auto& flat : flats(unit)) {
    FSDP_RETURN_IF_ERROR(flat->CheckBinding());
  }
  const absl::Status unwritten =
      units_[unit].parameters.CheckUnwrittenBetweenForwards();
  if (!unwritten.ok()) {
    GiveUpIteration(unwritten);
    return unwritten;
  }
  NoteWrittenShards(unit);  // also what was written inside the forward
  // A region's forward runs without grad, and its recomputation with it.
  if (records_graph || RegionScope::Current() != nullptr) {
    FSDP_RETURN_IF_ERROR(CheckHeldIsCurrent(unit));
  }
  return records_graph ? units_[unit].parameters.CheckHooks()
                       : absl::OkStatus();
}

// An optimizer may have stepped since Unshard(). Backward gathers anew, so the
// graph would mix two sets of values.
absl::Status ShardedModel::CheckHeldIsCurrent(int unit) const {
  const UnitState& state = units_[unit];
  if (!schedule_.IsHeldForUser(unit) || !runtime_->HoldsCopy(unit) ||
      state.versions_asked_for == state.parameters.ShardVersions()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "forward with grad of unit ", unit_name(unit),
      ", whose shards were written after Unshard() had gathered it: forward "
      "would compute with the old values and backward with the new ones. "
      "Reshard() it after writing, or Unshard() it then"));
}

// Reads requires_grad at every forward: it may change between steps.
void ShardedModel::AttachNode(int unit) {
  UnitState& state = units_[unit];
  auto running = std::make_shared<RunningUnit>();
  running->name = unit_name(unit);
  running->may_use_other_parameters = settings_.ignores_parameters;
  running->buffers = state.buffers;
  running->trainable = state.parameters.TakeTrainable();
  state.num_trainable = static_cast<int>(
      absl::c_count_if(running->trainable,
                       [](const auto& tensors) { return !tensors.empty(); }));
  state.running = running;
  state.start_sequence = at::sequence_number::peek();
  state.node.reset();
  if (state.num_trainable == 0) return;
  state.node = AttachUnitNode(weak_from_this(), unit, unit_name(unit),
                              running->trainable);
  state.edges_attached = true;
}

void ShardedModel::WatchInput(int unit, const at::Tensor& input) {
  const UnitState& state = units_[unit];
  if (state.num_trainable > 0) return;
  AttachEntry(weak_from_this(), state.start_sequence, input);
}

absl::Status ShardedModel::PostForward(int unit,
                                       const std::vector<at::Tensor*>& outputs,
                                       const SeenTensors& inputs) {
  FSDP_RETURN_IF_ERROR(BeforePostForward(unit, outputs));
  precision_.CastOutputs(unit, outputs);
  bool expects_backward = false;
  Nodes exits;
  if (c10::GradMode::is_enabled()) {
    const UnitState& state = units_[unit];
    exits = AttachExits(weak_from_this(),
                        {unit, unit_name(unit), state.start_sequence,
                         state.node, precision_.InFullPrecision(unit)},
                        outputs, inputs);
    expects_backward = !exits.empty();
  } else if (const RegionScope* region = RegionScope::Current()) {
    // The forward to which the backward belongs is the region's recomputation.
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
  const auto check = [&]() -> absl::Status {
    if (observer_ != nullptr) {
      FSDP_RETURN_IF_ERROR(observer_->BeforePostForward(unit, outputs));
    }
    FSDP_RETURN_IF_ERROR(units_[unit].parameters.CheckUnwrittenInForward());
    for (const auto& flat : flats(unit)) {
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
  };
  absl::Status status = check();
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
  FSDP_RETURN_IF_ERROR(TransitionOrGiveUp(event, {}));
  if (observer_ != nullptr) observer_->AfterPostForward(unit, exits);
  return absl::OkStatus();
}

void ShardedModel::AbandonForward(int unit, const absl::Status& thrown) {
  GiveUpIteration(absl::AbortedError(absl::StrCat(
      "the forward of unit ", unit_name(unit), " on ",
      communicator().names().Name(communicator().rank()), " threw an exception",
      thrown.ok() ? "" : ": ", thrown.message())));
}

absl::Status ShardedModel::RefuseWrite(int unit, const at::Tensor& target) {
  const UnitParameters& parameters = units_[unit].parameters;
  size_t first = 0;
  for (const auto& flat : runtime_->flats(unit)) {
    if (flat->Owns(target)) {
      if (flat->filled()) flat->Empty();
      return parameters.Modified(
          parameters.slots()[first + flat->IndexOf(target)]);
    }
    first += flat->num_parameters();
  }
  return absl::OkStatus();
}

}  // namespace fsdp
