#include "fsdp/trace/trace_category.h"

#include <optional>

namespace fsdp {

const char* Name(TraceCategory category) {
  switch (category) {
    case TraceCategory::kForward:
      return "forward";
    case TraceCategory::kRecompute:
      return "recompute";
    case TraceCategory::kBackward:
      return "backward";
    case TraceCategory::kGatherWait:
      return "gather wait";
    case TraceCategory::kReduceWait:
      return "reduce wait";
    case TraceCategory::kFence:
      return "fence";
    case TraceCategory::kAgreement:
      return "agreement";
    case TraceCategory::kCopy:
      return "copy";
    case TraceCategory::kStart:
      return "start";
    case TraceCategory::kFree:
      return "free";
    case TraceCategory::kOptimizer:
      return "optimizer";
    case TraceCategory::kBookkeeping:
      return "bookkeeping";
    case TraceCategory::kUser:
      return "user";
    case TraceCategory::kPhase:
      return "phase";
    case TraceCategory::kStep:
      return "step";
    case TraceCategory::kGathering:
      return "gathering";
    case TraceCategory::kReducing:
      return "reducing";
  }
  return "?";
}

std::optional<TraceCategory> TraceCategoryOf(absl::string_view name) {
  for (int i = 0; i < kNumTraceCategories; ++i) {
    const auto category = static_cast<TraceCategory>(i);
    if (name == Name(category)) return category;
  }
  return std::nullopt;
}

}  // namespace fsdp
