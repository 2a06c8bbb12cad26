// What the spans of a trace are: the "cat" of its JSON events, which
// //tools:trace_report reads again.
#ifndef FSDP_TRACE_TRACE_CATEGORY_H_
#define FSDP_TRACE_TRACE_CATEGORY_H_

#include <optional>

#include "absl/strings/string_view.h"

namespace fsdp {

enum class TraceCategory {
  // Of a rank's own thread, no two at the same time: a unit computes ...
  kForward,
  kRecompute,  // a forward inside backward
  kBackward,
  // ... it waits ...
  kGatherWait,
  kReduceWait,  // and adds to the shard's gradient
  kFence,       // for the other ranks of the host
  kAgreement,   // for all ranks: have they done the same
  // ... or does something else.
  kCopy,       // gradients to where the reduction reads, a part of parameters
  kStart,      // starts a collective, casts what it gathers from
  kFree,       // gives memory back
  kOptimizer,  // steps a unit in backward
  // Around those.
  kBookkeeping,  // all that the library does at an event of a unit
  kUser,         // fsdp::TraceSpan
  kPhase,        // a forward or backward of the root
  kStep,         // fsdp::TraceStep
  // Beside them: from the start of a collective to the end of its wait.
  kGathering,
  kReducing,
};
inline constexpr int kNumTraceCategories =
    static_cast<int>(TraceCategory::kReducing) + 1;

const char* Name(TraceCategory category);
// The category of that name.
std::optional<TraceCategory> TraceCategoryOf(absl::string_view name);

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_CATEGORY_H_
