#include "comm/rank_activity.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::comm {
absl::string_view PhaseName(Phase phase) {
  static constexpr absl::string_view kNames[] = {
      "no known phase", "forward",
      "backward",       "outside forward and backward",
      "checkpoint",     "the optimizer's step"};
  static_assert(std::size(kNames) == kNumPhases);
  return kNames[static_cast<size_t>(phase)];
}

std::string StoreWaitText(StoreWait wait, absl::string_view what) {
  switch (wait) {
    case StoreWait::kNothing:
      break;
    case StoreWait::kRead:
      return absl::StrCat("waits for ", what, " to be read from its store");
    case StoreWait::kRoom:
      return absl::StrCat("waits for memory for ", what, ", or its store");
    case StoreWait::kWrite:
      return absl::StrCat("waits for ", what, " to be written to its store");
  }
  return "waits for no store";
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

StoreWaitScope::StoreWaitScope(RankActivity* activity, StoreWait wait,
                               absl::string_view what)
    : activity_(activity) {
  if (activity_ != nullptr) wait_ = activity_->BeginWait(wait, what);
}

StoreWaitScope::~StoreWaitScope() {
  if (activity_ != nullptr) activity_->EndWait(wait_);
}

}  // namespace fsdp::comm
