// Writes timelines for Perfetto and chrome://tracing ("Trace Event Format").
#ifndef FSDP_TRACE_TRACE_JSON_H_
#define FSDP_TRACE_TRACE_JSON_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "fsdp/trace/trace_timeline.h"

namespace fsdp {

struct TraceOfRank {
  int rank = 0;
  // The zero of the file's times, in nanoseconds since 1970.
  int64_t base_ns = 0;
  int64_t num_dropped = 0;  // scopes, the oldest ones
};

// Returns the events of one rank, separated by commas. The rank is their
// process.
std::string TraceEvents(const TraceTimeline& timeline, const TraceOfRank& of);

// Returns a whole file from the TraceEvents() of each rank.
std::string TraceFile(absl::Span<const std::string> events);

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_JSON_H_
