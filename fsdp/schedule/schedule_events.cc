// Events: what is refused, and they and actions as text.
#include <cstddef>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {
namespace {

constexpr int kRoot = 0;

// In the order of EventKind.
constexpr const char* kEvents[] = {
    "PreForward",    "PostForward",  "PreBackward", "PostBackward",
    "EndOfBackward", "Reset",        "Unshard",     "WaitUnshard",
    "Reshard",       "SetReduction", "Release"};
// In the order of ActionKind.
constexpr const char* kActions[] = {
    "Load",       "Gather",     "GatherCopy",    "WaitGather",       "Free",
    "Shrink",     "DropPart",   "Accumulate",    "FillReduceBuffer", "Reduce",
    "Replicate",  "KeepSums",   "ReplicateSums", "WaitReduce",       "Step",
    "OpenShards", "CloseShards"};
static_assert(std::size(kEvents) ==
              static_cast<size_t>(EventKind::kRelease) + 1);
static_assert(std::size(kActions) ==
              static_cast<size_t>(ActionKind::kCloseShards) + 1);

}  // namespace

const char* Name(EventKind kind) { return kEvents[static_cast<int>(kind)]; }

const char* Name(ActionKind kind) { return kActions[static_cast<int>(kind)]; }

std::string ToString(const Event& event) {
  if (event.kind == EventKind::kEndOfBackward ||
      event.kind == EventKind::kReset || event.kind == EventKind::kRelease) {
    return Name(event.kind);
  }
  return absl::StrCat(Name(event.kind), "(", event.unit, ")");
}

std::string ToString(const Action& action) {
  return absl::StrCat(Name(action.kind), "(", action.unit, ")");
}

absl::Status Schedule::Check(const Event& event) const {
  const State& state = states_[event.unit];
  switch (event.kind) {
    case EventKind::kPreForward:
      return CheckPreForward(event);
    case EventKind::kPostForward:
      if (in_forward() && forward_stack_.back() == event.unit) {
        return absl::OkStatus();
      }
      return absl::FailedPreconditionError(absl::StrCat(
          "the forward of unit ", units_[event.unit].name,
          " ends, but its iteration was given up after an error inside it: let "
          "exceptions reach the caller of the root's forward"));
    case EventKind::kPreBackward:
    case EventKind::kPostBackward:
      return CheckBackward(event);
    case EventKind::kReshard:
      if (!state.running()) return absl::OkStatus();
      return absl::FailedPreconditionError(
          absl::StrCat("unit ", units_[event.unit].name,
                       " cannot be resharded while it computes"));
    case EventKind::kRelease:
      if (!in_forward() && !in_backward_) return absl::OkStatus();
      return absl::FailedPreconditionError(absl::StrCat(
          "the parameters of ", units_[kRoot].name,
          " cannot be taken as a whole inside its forward or backward"));
    case EventKind::kSetReduction:
      if (!in_forward() && !in_backward_) return absl::OkStatus();
      return absl::FailedPreconditionError(absl::StrCat(
          "how gradients of unit ", units_[event.unit].name,
          " are reduced cannot change inside a forward or backward of the "
          "model"));
    default:
      return absl::OkStatus();
  }
}

absl::Status Schedule::CheckPreForward(const Event& event) const {
  if (event.recomputes) return CheckBackward(event);
  const bool inner_first = event.unit != kRoot && !in_forward();
  if (inner_first && event.records_graph) {
    return absl::FailedPreconditionError(absl::StrCat(
        "forward with grad of unit ", units_[event.unit].name,
        " outside a forward of its root ", units_[kRoot].name,
        ": the root would not know that a backward is to come. Call the "
        "root's forward, shard this module on its own, or run it under "
        "torch::NoGradGuard"));
  }
  return absl::OkStatus();
}

absl::Status Schedule::CheckBackward(const Event& event) const {
  const bool post = event.kind == EventKind::kPostBackward;
  const std::string& name = units_[event.unit].name;
  if (states_[event.unit].stepped && (!post || event.reduces)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a second backward through unit ", name,
        ", whose parameters were stepped in the first: with the optimizer in "
        "backward every forward has one backward"));
  }
  if (options_.step_in_backward && in_forward() && post && event.reduces &&
      event.synchronizes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a backward inside a forward has gradients of unit ", name,
        ", and the optimizer in backward would step what the forward still "
        "computes with: run that backward after the forward, or the optimizer "
        "after backward"));
  }
  return absl::OkStatus();
}

}  // namespace fsdp
