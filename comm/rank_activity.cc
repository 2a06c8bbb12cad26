#include "comm/rank_activity.h"

#include <utility>

namespace fsdp::comm {

absl::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kUnknown:
      return "no known phase";
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kOutside:
      return "outside forward and backward";
    case Phase::kCheckpoint:
      return "checkpoint";
  }
  return "no known phase";
}

PhaseScope::PhaseScope(std::shared_ptr<RankActivity> activity, Phase phase,
                       absl::string_view what)
    : activity_(std::move(activity)) {
  if (activity_ != nullptr) activity_->Note(phase, what, /*pool_bytes=*/-1);
}

PhaseScope::~PhaseScope() {
  if (activity_ != nullptr) {
    activity_->Note(Phase::kOutside, "", /*pool_bytes=*/-1);
  }
}

}  // namespace fsdp::comm
