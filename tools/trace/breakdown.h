// Where the time of traced steps has gone.
#ifndef TOOLS_TRACE_BREAKDOWN_H_
#define TOOLS_TRACE_BREAKDOWN_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {

// What a moment was spent on: the name of its span's category, for the user's
// spans their own name, or this, where no span is: the loss, for example.
inline constexpr absl::string_view kOther = "other";

// A piece of a rank's time; `what` is one of the names above.
struct Slice {
  double begin;
  double end;
  std::string what;
  std::string unit;  // empty: of none
  std::string name;  // of the span
};

// Divides [begin, end) of a rank's time: every moment belongs to the innermost
// span over it, the user's spans and bookkeeping to what is inside them.
// Without empty slices.
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
  std::map<std::string, Times> units;  // what of it belongs to a unit
  std::map<std::string, int64_t> bytes_gathered;  // by unit

  double seconds() const { return end - begin; }
  double Of(absl::string_view what) const;
  // Waits for other ranks.
  double exposed() const;
  // Forward, backward and what is computed again.
  double compute() const;
};

// By rank, then by time. A step that a trace has twice is there twice.
std::vector<StepTimes> BreakDown(absl::Span<const RankTrace> traces);

// All that some step has spent time on: what the library knows in its order,
// then the user's names, then kOther.
std::vector<std::string> KindsOf(absl::Span<const StepTimes> steps);

}  // namespace fsdp::trace_report

#endif  // TOOLS_TRACE_BREAKDOWN_H_
