// A traced step as a drawing.
#ifndef TOOLS_TRACE_PICTURE_H_
#define TOOLS_TRACE_PICTURE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "tools/drawing/lane_chart.h"
#include "tools/trace/breakdown.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {

struct PictureOptions {
  std::optional<int64_t> step;  // default: the last that all ranks have
  std::vector<int> ranks;       // default: the first four
};

// For every rank a lane each of what it computes and waits for, what it does
// besides, and what is in flight meanwhile. `steps`: BreakDown(traces).
// InvalidArgument: there is no such step, or no such rank.
absl::StatusOr<drawing::LaneChart> DrawStep(absl::Span<const RankTrace> traces,
                                            absl::Span<const StepTimes> steps,
                                            const PictureOptions& options);

}  // namespace fsdp::trace_report

#endif  // TOOLS_TRACE_PICTURE_H_
