// Finds writes since the last look by LibTorch's version counters.
//
// An optimizer or a state dict writes a shard in place, which counts. The
// module's tensors take their values from shards in ways that LibTorch does not
// see, so they are made to count along: what a graph has saved of them becomes
// stale to LibTorch too, which refuses it in backward as without sharding.
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

// Accepts all writes to the module's tensors so far.
void ShardedModel::SeeVersions() {
  for (UnitState& state : units_) {
    for (Slot& slot : state.slots) {
      slot.version = slot.tensors.front()._version();
    }
  }
}

// Returns whether any shard was written.
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
    // Other writes to the tensor remain to be found.
    slot.version += slot.tensors.front()._version() - before;
    any = true;
  }
  return any;
}

// Must run at the first event of a backward, before anything that it reads is
// compared.
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

// An optimizer may have stepped since Unshard(). Backward gathers anew, so the
// graph would mix two sets of values.
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

// Refuses writes to gathered values, which the unit's next use would lose.
absl::Status ShardedModel::CheckUnwrittenBetweenForwards(int unit) const {
  for (const Slot& slot : units_[unit].slots) {
    if (slot.tensors.front()._version() == slot.version) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "parameter ", slot.name, " of unit ", unit_name(unit),
        " was written outside a forward, while the unit was gathered by "
        "Unshard() for example: the change would be lost when it is freed. "
        "Write through NamedShards() or SummonFullParams()"));
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
      "NamedShards() between steps, or compute with a copy"));
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
