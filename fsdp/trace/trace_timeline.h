// What a rank has done when, made of the scopes it has been in. Knows no torch.
#ifndef FSDP_TRACE_TRACE_TIMELINE_H_
#define FSDP_TRACE_TRACE_TIMELINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/trace/trace_buffer.h"
#include "fsdp/trace/trace_category.h"

namespace fsdp {

struct TraceTimeline {
  struct Span {
    TraceCategory category;
    std::string name;  // "WaitGather blocks.0"
    std::string unit;  // "blocks.0"; empty: of none
    int64_t begin_ns;
    int64_t end_ns;
    int64_t bytes = 0;  // gathered, reduced or copied
    int64_t step = 0;   // its number, for kStep
    // For kGathering and kReducing: spans of one lane do not overlap.
    int lane = 0;
  };
  // From `time_ns` on.
  struct Memory {
    int64_t time_ns;
    int64_t unsharded;       // bytes of units gathered or being gathered
    int64_t reduce_buffers;  // bytes
  };
  std::vector<Span> spans;  // outer ones before those inside them
  std::vector<Memory> memory;
};

// Of the last `last_steps` TraceSteps and what came after them; 0, or fewer
// steps than that: of everything.
TraceTimeline MakeTimeline(const TraceBuffer& buffer, int64_t last_steps);

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_TIMELINE_H_
