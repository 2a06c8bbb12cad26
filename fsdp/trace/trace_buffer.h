// The scopes that one rank has been in: bounded, and without allocations once
// every unit has been seen. Knows no torch.
#ifndef FSDP_TRACE_TRACE_BUFFER_H_
#define FSDP_TRACE_TRACE_BUFFER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
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

// The scope that a range of that name is, and the unit it is about:
// "fsdp::Gather(blocks.0)". Any other name is kUser's own.
struct NamedScope {
  TraceScope scope;
  absl::string_view name;
};
NamedScope ParseScope(absl::string_view range);

// Not thread-safe.
class TraceBuffer {
 public:
  // A scope that has ended. Times are those that were given.
  struct Record {
    TraceScope scope;
    int name;          // see name()
    int64_t sequence;  // scopes in the order of their begin
    int64_t begin_ns;
    int64_t end_ns;  // at least begin_ns
  };
  // Of a unit; 0 as long as nobody has said.
  struct UnitBytes {
    int64_t unsharded = 0;
    int64_t reduce_buffer = 0;
  };

  // Room for `capacity` records, at least 1; beyond it the oldest go.
  explicit TraceBuffer(int64_t capacity);

  // Scopes nest. `name`: of the unit, or the user's.
  void Begin(TraceScope scope, absl::string_view name, int64_t now_ns);
  // Of the innermost; without one, nothing.
  void End(int64_t now_ns);
  void SetUnitBytes(absl::string_view unit, UnitBytes bytes);

  // In the order of their end: a scope comes behind those inside it.
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
  std::vector<Record> open_;  // up to its capacity
  int64_t num_too_deep_ = 0;  // open ones beyond it
  int64_t next_sequence_ = 0;
  absl::flat_hash_map<std::string, int> indices_;
  std::vector<std::string> names_;
  std::vector<UnitBytes> bytes_;  // by name
};

// What the spans of a trace are: the "cat" of its JSON events, which
// //tools:trace_report reads again.

enum class TraceCategory {
  // Of a rank's own thread, no two at the same time: a unit computes ...
  kForward,
  kRecompute,  // a forward inside backward
  kBackward,
  // ... it waits ...
  kGatherWait,
  kReduceWait,  // and adds to the shard's gradient
  kFence,       // for the other ranks of the host
  kAgreement,   // for all ranks: have they done the same
  // ... or does something else.
  kCopy,       // gradients to where the reduction reads, a part of parameters
  kStart,      // starts a collective, casts what it gathers from
  kFree,       // gives memory back
  kOptimizer,  // steps a unit in backward
  // Around those.
  kBookkeeping,  // all that the library does at an event of a unit
  kUser,         // fsdp::TraceSpan
  kPhase,        // a forward or backward of the root
  kStep,         // fsdp::TraceStep
  // Beside them: from the start of a collective to the end of its wait.
  kGathering,
  kReducing,
};
inline constexpr int kNumTraceCategories =
    static_cast<int>(TraceCategory::kReducing) + 1;

const char* Name(TraceCategory category);
// The category of that name.
std::optional<TraceCategory> TraceCategoryOf(absl::string_view name);

}  // namespace fsdp

#endif  // FSDP_TRACE_TRACE_BUFFER_H_
