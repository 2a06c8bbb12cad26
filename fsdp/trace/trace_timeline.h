// Makes a timeline of what a rank has done, from the scopes it has been in, and
// writes it for Perfetto and chrome://tracing ("Trace Event Format"). It needs
// no torch.
#ifndef FSDP_TRACE_TRACE_TIMELINE_H_
#define FSDP_TRACE_TRACE_TIMELINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "fsdp/trace/trace_buffer.h"

namespace fsdp {

struct TraceTimeline {
  struct Span {
    TraceCategory category;
    std::string name;  // "WaitGather blocks.0"
    std::string unit;  // "blocks.0"; empty: no unit
    int64_t begin_ns;
    int64_t end_ns;
    int64_t bytes = 0;  // gathered, reduced or copied
    int64_t step = 0;   // its number, for kStep
    // Spans of kGathering in one lane do not overlap; likewise kReducing.
    int lane = 0;
  };
  // The memory in use from `time_ns` on.
  struct Memory {
    int64_t time_ns;
    int64_t unsharded;       // bytes of units gathered or being gathered
    int64_t reduce_buffers;  // bytes
  };
  std::vector<Span> spans;  // outer ones before those inside them
  std::vector<Memory> memory;
};

// Makes the timeline of the last `last_steps` TraceSteps and of what came after
// them; of everything, if that is 0 or there are fewer steps.
TraceTimeline MakeTimeline(const TraceBuffer& buffer, int64_t last_steps);

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

#endif  // FSDP_TRACE_TRACE_TIMELINE_H_
