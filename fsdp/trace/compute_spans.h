// Which unit computes when: what lies between the events of the schedule.
#ifndef FSDP_TRACE_COMPUTE_SPANS_H_
#define FSDP_TRACE_COMPUTE_SPANS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "fsdp/trace/trace_buffer.h"
#include "fsdp/trace/trace_category.h"
#include "fsdp/trace/unit_spans.h"

namespace fsdp {

// Adds kForward, kRecompute and kBackward of units, and kPhase of whole
// forwards and backwards. Is told of each event (TraceScope::Kind::kEvent) at
// its begin and at its end, in the order of time; events nest.
class ComputeSpans {
 public:
  // `*spans` outlives this.
  explicit ComputeSpans(UnitSpans* spans) : spans_(spans) {}

  void OnEventBegin(const TraceBuffer::Record& event);
  void OnEventEnd(const TraceBuffer::Record& event);

 private:
  struct Running {
    int unit;
    TraceCategory category;
  };

  void StopComputing(int64_t now_ns);
  void BeginEvent(const TraceBuffer::Record& event);
  void EndEvent(const TraceBuffer::Record& event);
  void Leave(int unit, bool in_backward);
  void EndForward(const TraceBuffer::Record& event);
  void EndBackward(const TraceBuffer::Record& event);
  void GiveUp();

  UnitSpans* const spans_;
  std::vector<Running> running_;  // the innermost last
  int events_open_ = 0;
  bool given_up_ = false;  // in the event that is open
  int64_t computing_since_ = 0;
  std::optional<int64_t> forward_began_;
  std::optional<int64_t> backward_began_;
};

}  // namespace fsdp

#endif  // FSDP_TRACE_COMPUTE_SPANS_H_
