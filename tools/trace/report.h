// Breaks down where the time of traced steps has gone, and prints that for
// people and for spreadsheets.
#ifndef TOOLS_TRACE_REPORT_H_
#define TOOLS_TRACE_REPORT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {

// A moment is spent on the category of its span, for the user's spans on their
// own name. Where there is no span, for example in the loss, it is spent on
// this.
inline constexpr absl::string_view kOther = "other";

// A piece of a rank's time. `what` is one of the names above.
struct Slice {
  double begin;
  double end;
  std::string what;
  std::string unit;  // empty: belongs to none
  std::string name;  // of the span
};

// Divides [begin, end) of a rank's time: every moment belongs to the innermost
// span over it; the user's spans and bookkeeping yield to the spans inside
// them. No slice is empty.
std::vector<Slice> SlicesOf(const RankTrace& trace, double begin, double end);

// Seconds, by what they were spent on.
using Times = std::map<std::string, double>;

// One step of one rank.
struct StepTimes {
  int rank;
  int64_t step;
  double begin;
  double end;
  Times times;                         // sums up to end - begin
  std::map<std::string, Times> units;  // the part that belongs to units
  std::map<std::string, int64_t> bytes_gathered;  // by unit

  double seconds() const { return end - begin; }
  double Of(absl::string_view what) const;
  // Waits for other ranks.
  double exposed() const;
  // Forward, backward and recomputation.
  double compute() const;
};

// Sorted by rank, then by time. A step that a trace has twice appears twice.
std::vector<StepTimes> BreakDown(absl::Span<const RankTrace> traces);

// Returns all that any step has spent time on: the library's categories in
// their order, then the user's names, then kOther.
std::vector<std::string> KindsOf(absl::Span<const StepTimes> steps);

// Returns tables of steps, ranks and units, and how far ranks are apart.
// `steps` is BreakDown(traces), not empty.
std::string ToText(absl::Span<const RankTrace> traces,
                   absl::Span<const StepTimes> steps);

// Returns a line per step, rank, unit and kind of time, in milliseconds. Lines
// without a unit are sums over all units; their kind "step" is the whole step.
std::string ToCsv(absl::Span<const StepTimes> steps);

}  // namespace fsdp::trace_report

#endif  // TOOLS_TRACE_REPORT_H_
