// Makes a timeline of what a rank has done, from the scopes it has been in. It
// needs no torch.
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

// Appends spans of units, known by their names in a buffer, to `*spans`. Both
// arguments outlive this.
class UnitSpans {
 public:
  UnitSpans(const TraceBuffer& buffer, std::vector<TraceTimeline::Span>* spans)
      : buffer_(buffer), spans_(spans) {}

  // Adds a span named "`what` <name of the unit>". `unit` is a
  // TraceBuffer::Record::name.
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

// Adds a span for each action of the schedule (TraceScope::Kind::kAction),
// kGathering and kReducing for collectives in flight, and a sample of the
// memory whenever it changes. The caller tells it the begin and the end of each
// action, in the order of time.
class CollectiveSpans {
 public:
  // All arguments outlive this.
  CollectiveSpans(const TraceBuffer& buffer, UnitSpans* spans,
                  std::vector<TraceTimeline::Memory>* memory)
      : buffer_(buffer), spans_(spans), samples_(memory) {}

  void OnActionBegin(const TraceBuffer::Record& action);
  void OnActionEnd(const TraceBuffer::Record& action);
  // Notes that the iteration was given up: nothing is in flight or in memory.
  void OnReset(int64_t now_ns);

 private:
  struct Reduction {
    int unit;
    int64_t begin_ns;  // of the collective; 0: it has not started
  };
  struct UnitState {
    bool is_gathered = false;  // gathered, or being gathered
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

// Adds kForward, kRecompute and kBackward of units, which lie between the
// events of the schedule, and kPhase of whole forwards and backwards. The
// caller tells it the begin and the end of each event
// (TraceScope::Kind::kEvent), in the order of time; events nest.
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
  bool given_up_ = false;  // by the event that is open
  int64_t computing_since_ = 0;
  std::optional<int64_t> forward_began_;
  std::optional<int64_t> backward_began_;
};

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_TIMELINE_H_
