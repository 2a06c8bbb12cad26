// What a rank has done when, made of the scopes it has been in. Knows no torch.
#ifndef FSDP_TRACE_TRACE_TIMELINE_H_
#define FSDP_TRACE_TRACE_TIMELINE_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "fsdp/trace/trace_buffer.h"

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

// Spans of units, by the names that a buffer knows them by.

// Appends to `*spans`; both arguments outlive this.
class UnitSpans {
 public:
  UnitSpans(const TraceBuffer& buffer, std::vector<TraceTimeline::Span>* spans)
      : buffer_(buffer), spans_(spans) {}

  // "`what` <name of the unit>". `unit`: TraceBuffer::Record::name.
  void Add(TraceCategory category, absl::string_view what, int unit,
           int64_t begin_ns, int64_t end_ns, int64_t bytes = 0) {
    const std::string& name = buffer_.name(unit);
    spans_->push_back({category, absl::StrCat(what, " ", name), name, begin_ns,
                       end_ns, bytes});
  }

 private:
  const TraceBuffer& buffer_;
  std::vector<TraceTimeline::Span>* const spans_;
};

// What the actions of the schedule took, from when to when collectives were in
// flight, and the memory that they fill.

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

// Which unit computes when: what lies between the events of the schedule.

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

#endif  // FSDP_TRACE_TRACE_TIMELINE_H_
