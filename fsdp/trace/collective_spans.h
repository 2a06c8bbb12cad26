// What the actions of the schedule took, from when to when collectives were in
// flight, and the memory that they fill.
#ifndef FSDP_TRACE_COLLECTIVE_SPANS_H_
#define FSDP_TRACE_COLLECTIVE_SPANS_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "fsdp/trace/trace_buffer.h"
#include "fsdp/trace/trace_timeline.h"
#include "fsdp/trace/unit_spans.h"

namespace fsdp {

// Adds a span for each action (TraceScope::Kind::kAction), kGathering and
// kReducing, and a sample of the memory whenever it changes. Is told of each
// action at its begin and at its end, in the order of time.
class CollectiveSpans {
 public:
  // All outlive this.
  CollectiveSpans(const TraceBuffer& buffer, UnitSpans* spans,
                  std::vector<TraceTimeline::Memory>* memory)
      : buffer_(buffer), spans_(spans), samples_(memory) {}

  void OnActionBegin(const TraceBuffer::Record& action);
  void OnActionEnd(const TraceBuffer::Record& action);
  // The iteration is given up: nothing is in flight any more, or in memory.
  void OnReset(int64_t now_ns);

 private:
  struct Reduction {
    int unit;
    int64_t begin_ns;  // of the collective; 0: only filled
  };
  struct UnitState {
    bool is_gathered = false;  // or being gathered
    std::optional<int64_t> gather_began;
    bool has_whole_gradients = false;
  };

  int64_t Start(const TraceBuffer::Record& action);
  void NoteMemory(int64_t now_ns);
  void AddReduceBuffer(const TraceBuffer::Record& action);
  void FinishGather(const TraceBuffer::Record& action);
  void FinishReduction(const TraceBuffer::Record& action);

  const TraceBuffer& buffer_;
  UnitSpans* const spans_;
  std::vector<TraceTimeline::Memory>* const samples_;
  absl::flat_hash_map<int, UnitState> units_;
  std::deque<Reduction> reductions_;  // oldest first
  TraceTimeline::Memory memory_ = {0, 0, 0};
};

}  // namespace fsdp

#endif  // FSDP_TRACE_COLLECTIVE_SPANS_H_
