// Prints a breakdown for people and for spreadsheets.
#ifndef TOOLS_TRACE_REPORT_H_
#define TOOLS_TRACE_REPORT_H_

#include <string>

#include "absl/types/span.h"
#include "tools/trace/breakdown.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {

// Returns tables of steps, ranks and units, and how far ranks are apart.
// `steps` is BreakDown(traces), not empty.
std::string ToText(absl::Span<const RankTrace> traces,
                   absl::Span<const StepTimes> steps);

// Returns a line per step, rank, unit and kind of time, in milliseconds. Lines
// without a unit are sums over all units; their kind "step" is the whole step.
std::string ToCsv(absl::Span<const StepTimes> steps);

}  // namespace fsdp::trace_report

#endif  // TOOLS_TRACE_REPORT_H_
