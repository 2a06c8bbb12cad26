// Records the scopes that a rank has been in, makes a timeline of them, and
// writes it for Perfetto and chrome://tracing ("Trace Event Format"). It needs
// no torch.
#ifndef FSDP_TRACE_TRACE_TIMELINE_H_
#define FSDP_TRACE_TRACE_TIMELINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

struct TraceScope {
  enum class Kind : uint8_t {
    kEvent,       // of the schedule, with its actions inside
    kAction,      // of the schedule
    kOrderCheck,  // ranks compare their collectives
    kUser,
    kStep,
  };
  Kind kind;
  EventKind event = EventKind::kPreForward;  // for kEvent
  ActionKind action = ActionKind::kGather;   // for kAction
  int64_t step = 0;                          // for kStep: its number
};

// A scope and the name of its unit, or the user's name for kUser.
struct NamedScope {
  TraceScope scope;
  absl::string_view name;
};
// Parses the name of a range, "fsdp::Gather(blocks.0)". Any other name is a
// kUser scope.
NamedScope ParseScope(absl::string_view range);

// Records the scopes that a rank has been in, in bounded memory. It allocates
// nothing once it has seen every unit. Not thread-safe.
class TraceBuffer {
 public:
  // A scope that has ended. Times are in the clock of the caller.
  struct Record {
    TraceScope scope;
    int name;          // see name()
    int64_t sequence;  // counts scopes in the order of their begin
    int64_t begin_ns;
    int64_t end_ns;  // at least begin_ns
  };
  // The sizes of a unit; 0 until SetUnitBytes().
  struct UnitBytes {
    int64_t unsharded = 0;
    int64_t reduce_buffer = 0;
  };

  // Keeps the last `capacity` records, at least 1.
  explicit TraceBuffer(int64_t capacity);

  // Begins a scope; scopes nest. `name` is that of the unit, or the user's.
  void Begin(TraceScope scope, absl::string_view name, int64_t now_ns);
  // Ends the innermost scope, if there is one.
  void End(int64_t now_ns);
  void SetUnitBytes(absl::string_view unit, UnitBytes bytes);

  // Returns records in the order of their end: a scope follows those inside it.
  std::vector<Record> Records() const;
  int64_t num_dropped() const { return num_dropped_; }
  const std::string& name(int index) const { return names_[index]; }
  UnitBytes unit_bytes(int name) const { return bytes_[name]; }

 private:
  int IndexOf(absl::string_view name);

  std::vector<Record> ring_;
  size_t next_ = 0;  // where the next record goes
  size_t size_ = 0;
  int64_t num_dropped_ = 0;
  std::vector<Record> open_;
  int64_t next_sequence_ = 0;
  absl::flat_hash_map<std::string, int> indices_;
  std::vector<std::string> names_;
  std::vector<UnitBytes> bytes_;  // by name
};

// The kinds of spans in a trace. Their names are the "cat" of its JSON events,
// which //tools:trace_report reads.
enum class TraceCategory {
  // The first three groups are of a rank's own thread and never overlap. A unit
  // computes:
  kForward,
  kRecompute,  // a forward inside backward
  kBackward,
  // It waits:
  kGatherWait,
  kReduceWait,  // and adds to the shard's gradient
  kFence,       // for the other ranks of the host
  kAgreement,   // for all ranks, to compare what they have done
  // It does something else:
  kCopy,       // copies gradients to the reduce buffer, or a part of parameters
  kStart,      // starts a collective, casts what it gathers from
  kFree,       // gives memory back
  kOptimizer,  // steps a unit in backward
  // These enclose the ones above:
  kBookkeeping,  // all that the library does at an event of a unit
  kUser,         // fsdp::TraceSpan
  kPhase,        // a forward or backward of the root
  kStep,         // fsdp::TraceStep
  // These last from the start of a collective to the end of its wait:
  kGathering,
  kReducing,
};

const char* Name(TraceCategory category);

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
