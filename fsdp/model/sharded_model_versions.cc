// Who has written what since it was last seen, by LibTorch's version counters.
//
// A shard is written in place by an optimizer or a state dict, and counts that.
// The module's tensors, whose values come from shards by ways that LibTorch
// does not see, are made to count along: what a graph has saved of them is then
// stale to LibTorch, too, which refuses it in backward as it would without
// sharding.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {

// What was written by other ways than shards is forgotten.
void ShardedModel::SeeVersions() {
  for (UnitState& state : units_) {
    for (Slot& slot : state.slots) {
      slot.version = slot.tensors.front()._version();
    }
  }
}

// Whether any was.
bool ShardedModel::NoteWrittenShards(int unit) {
  bool any = false;
  for (Slot& slot : units_[unit].slots) {
    const uint32_t version = slot.shard._version();
    if (version == slot.shard_version) continue;
    slot.shard_version = version;
    const uint32_t before = slot.tensors.front()._version();
    for (const at::Tensor& tensor : slot.tensors) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
    // What else has written the tensor stays to be found.
    slot.version += slot.tensors.front()._version() - before;
    any = true;
  }
  return any;
}

// At its first event, when nothing that it will read has been looked at.
void ShardedModel::NoteWritesBeforeBackward() {
  written_before_backward_.clear();
  for (int unit = 0; unit < num_units(); ++unit) {
    if (NoteWrittenShards(unit)) written_before_backward_ = unit_name(unit);
  }
  NoteEndOfStep();
}

absl::Status ShardedModel::ExplainStaleGraph(absl::Status status) const {
  if (written_before_backward_.empty() ||
      !absl::StrContains(status.message(),
                         "modified by an inplace operation")) {
    return status;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "backward through a forward whose parameters have changed since: shards "
      "of unit ",
      written_before_backward_,
      " were written in between, by an optimizer's step or a state dict for "
      "example. Run the backward first. LibTorch says: ",
      status.message()));
}

std::vector<uint32_t> ShardedModel::ShardVersions(int unit) const {
  std::vector<uint32_t> versions;
  for (const Slot& slot : units_[unit].slots) {
    versions.push_back(slot.shard._version());
  }
  return versions;
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

// The values would be those of a gather that ends with the unit's next use.
absl::Status ShardedModel::CheckUnwrittenBetweenForwards(int unit) const {
  for (const Slot& slot : units_[unit].slots) {
    if (slot.tensors.front()._version() == slot.version) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter ", slot.name, " of unit ", unit_name(unit),
        " was written outside a forward, while the unit was gathered by "
        "Unshard() for example: the change would be lost when it is freed. "
        "Write through Ranges() or SummonFullParams()"));
  }
  return absl::OkStatus();
}

absl::Status ShardedModel::Modified(int unit, const Slot& slot) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "parameter ", slot.name,
      " was modified in place during the forward of "
      "unit ",
      unit_name(unit),
      ": the change would be lost when the unit is freed. Write through "
      "Ranges() between steps, or compute with a copy"));
}

absl::Status ShardedModel::RefuseWrite(int unit, const at::Tensor& target) {
  size_t first = 0;
  for (const auto& flat : runtime_->flats(unit)) {
    if (flat->Owns(target)) {
      if (flat->filled()) flat->Empty();
      return Modified(unit, units_[unit].slots[first + flat->IndexOf(target)]);
    }
    first += flat->num_parameters();
  }
  return absl::OkStatus();
}

}  // namespace fsdp
