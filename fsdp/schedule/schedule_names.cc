// Events and actions as text.
#include <string>

#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

const char* Name(EventKind kind) {
  switch (kind) {
    case EventKind::kPreForward:
      return "PreForward";
    case EventKind::kPostForward:
      return "PostForward";
    case EventKind::kPreBackward:
      return "PreBackward";
    case EventKind::kPostBackward:
      return "PostBackward";
    case EventKind::kEndOfBackward:
      return "EndOfBackward";
    case EventKind::kReset:
      return "Reset";
    case EventKind::kUnshard:
      return "Unshard";
    case EventKind::kWaitUnshard:
      return "WaitUnshard";
    case EventKind::kReshard:
      return "Reshard";
    case EventKind::kRelease:
      return "Release";
    case EventKind::kSetReduction:
      return "SetReduction";
  }
  return "?";
}

const char* Name(ActionKind kind) {
  switch (kind) {
    case ActionKind::kLoad:
      return "Load";
    case ActionKind::kGather:
      return "Gather";
    case ActionKind::kGatherCopy:
      return "GatherCopy";
    case ActionKind::kWaitGather:
      return "WaitGather";
    case ActionKind::kFree:
      return "Free";
    case ActionKind::kShrink:
      return "Shrink";
    case ActionKind::kDropPart:
      return "DropPart";
    case ActionKind::kAccumulate:
      return "Accumulate";
    case ActionKind::kFillReduceBuffer:
      return "FillReduceBuffer";
    case ActionKind::kReduce:
      return "Reduce";
    case ActionKind::kReplicate:
      return "Replicate";
    case ActionKind::kKeepSums:
      return "KeepSums";
    case ActionKind::kReplicateSums:
      return "ReplicateSums";
    case ActionKind::kWaitReduce:
      return "WaitReduce";
    case ActionKind::kStep:
      return "Step";
    case ActionKind::kOpenShards:
      return "OpenShards";
    case ActionKind::kCloseShards:
      return "CloseShards";
  }
  return "?";
}

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

}  // namespace fsdp
