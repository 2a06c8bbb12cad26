#include "fsdp/trace/trace_timeline.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <iterator>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/json.h"

namespace fsdp {
namespace {

using Record = TraceBuffer::Record;
using Span = TraceTimeline::Span;

TraceCategory CategoryOf(ActionKind kind) {
  switch (kind) {
    case ActionKind::kLoad:
    case ActionKind::kGather:
    case ActionKind::kGatherCopy:
    case ActionKind::kReduce:
    case ActionKind::kReplicateSums:
      return TraceCategory::kStart;
    case ActionKind::kWaitGather:
      return TraceCategory::kGatherWait;
    case ActionKind::kReplicate:
    case ActionKind::kKeepSums:
    case ActionKind::kWaitReduce:
      return TraceCategory::kReduceWait;
    case ActionKind::kFree:
    case ActionKind::kDropPart:
      return TraceCategory::kFree;
    case ActionKind::kShrink:
    case ActionKind::kAccumulate:
    case ActionKind::kFillReduceBuffer:
      return TraceCategory::kCopy;
    case ActionKind::kStep:
      return TraceCategory::kOptimizer;
    case ActionKind::kOpenShards:
    case ActionKind::kCloseShards:
      return TraceCategory::kFence;
  }
  return TraceCategory::kBookkeeping;
}

// Follows the scopes in the order in which they began and ended. Each is a
// span; others lie between them: kForward, kRecompute and kBackward of units
// between events, which nest, kPhase of whole forwards and backwards, and
// kGathering and kReducing of collectives in flight. The memory is sampled
// whenever it changes.
class Builder {
 public:
  explicit Builder(const TraceBuffer& buffer) : buffer_(buffer) {}

  TraceTimeline Build() {
    std::vector<Record> records = buffer_.Records();
    // A scope surrounds another if it began before it and ended after it.
    std::vector<size_t> order(records.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return records[a].sequence < records[b].sequence;
    });
    std::vector<size_t> open;
    for (const size_t i : order) {
      for (; !open.empty() && open.back() < i; open.pop_back()) {
        OnEnd(records[open.back()]);
      }
      OnBegin(records[i]);
      open.push_back(i);
    }
    for (; !open.empty(); open.pop_back()) OnEnd(records[open.back()]);
    return std::move(timeline_);
  }

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
  struct Running {
    int unit;
    TraceCategory category;
  };

  // Adds a span named "`what` <name of the unit>". `unit` is a
  // TraceBuffer::Record::name.
  void Add(TraceCategory category, absl::string_view what, int unit,
           int64_t begin_ns, int64_t end_ns, int64_t bytes = 0) {
    const std::string& name = buffer_.name(unit);
    timeline_.spans.push_back({category, absl::StrCat(what, " ", name), name,
                               begin_ns, end_ns, bytes});
  }
  // Adds the span of a scope of a unit.
  void Add(TraceCategory category, absl::string_view what, const Record& scope,
           int64_t bytes = 0) {
    Add(category, what, scope.name, scope.begin_ns, scope.end_ns, bytes);
  }

  void OnBegin(const Record& record) {
    const TraceScope& scope = record.scope;
    switch (scope.kind) {
      case TraceScope::Kind::kEvent:
        OnEventBegin(record);
        return Add(TraceCategory::kBookkeeping, Name(scope.event), record);
      case TraceScope::Kind::kAction: {
        const int64_t moved = OnActionBegin(record);
        return Add(CategoryOf(scope.action), Name(scope.action), record, moved);
      }
      case TraceScope::Kind::kOrderCheck:
        return Add(TraceCategory::kAgreement, "CheckOrder", record);
      case TraceScope::Kind::kUser:
        timeline_.spans.push_back({TraceCategory::kUser,
                                   buffer_.name(record.name), "",
                                   record.begin_ns, record.end_ns});
        return;
      case TraceScope::Kind::kStep:
        timeline_.spans.push_back(
            {TraceCategory::kStep, absl::StrCat("step ", scope.step), "",
             record.begin_ns, record.end_ns, 0, scope.step});
        return;
    }
  }

  void OnEnd(const Record& record) {
    if (record.scope.kind == TraceScope::Kind::kAction) {
      OnActionEnd(record);
    } else if (record.scope.kind == TraceScope::Kind::kEvent) {
      if (!given_up_) OnEventEnd(record);
      if (--events_open_ > 0) return;
      given_up_ = false;
      computing_since_ = record.end_ns;
    }
  }

  // --- Actions: collectives and memory ---------------------------------------
  // Returns the bytes that the action moves.
  int64_t OnActionBegin(const Record& action) {
    const TraceBuffer::UnitBytes bytes = buffer_.unit_bytes(action.name);
    UnitState& state = units_[action.name];
    switch (action.scope.action) {
      case ActionKind::kGather:
      case ActionKind::kGatherCopy:
        if (!state.is_gathered) memory_.unsharded += bytes.unsharded;
        state.is_gathered = true;
        state.gather_began = action.begin_ns;
        NoteMemory(action.begin_ns);
        return bytes.unsharded;
      case ActionKind::kAccumulate:
      case ActionKind::kFillReduceBuffer: {
        const bool reduces =
            action.scope.action == ActionKind::kFillReduceBuffer;
        if (!std::exchange(state.has_whole_gradients, !reduces)) {
          memory_.reduce_buffers += bytes.reduce_buffer;
          NoteMemory(action.begin_ns);
        }
        if (reduces) reductions_.push_back({action.name, 0});
        return bytes.reduce_buffer;
      }
      case ActionKind::kReduce:
        if (!reductions_.empty()) reductions_.back().begin_ns = action.begin_ns;
        return bytes.reduce_buffer;
      default:
        return 0;
    }
  }

  void OnActionEnd(const Record& action) {
    UnitState& state = units_[action.name];
    switch (action.scope.action) {
      case ActionKind::kWaitGather:
        return FinishGather(action, state);
      case ActionKind::kFree:
      case ActionKind::kShrink:
        FinishGather(action, state);
        if (!std::exchange(state.is_gathered, false)) return;
        memory_.unsharded -= buffer_.unit_bytes(action.name).unsharded;
        return NoteMemory(action.end_ns);
      case ActionKind::kKeepSums:
      case ActionKind::kWaitReduce:
        return FinishReduction(action);
      default:
        return;
    }
  }

  void NoteMemory(int64_t now_ns) {
    memory_.time_ns = now_ns;
    timeline_.memory.push_back(memory_);
  }

  void FinishGather(const Record& action, UnitState& state) {
    if (!state.gather_began) return;
    Add(TraceCategory::kGathering, "all-gather of", action.name,
        *std::exchange(state.gather_began, std::nullopt), action.end_ns,
        buffer_.unit_bytes(action.name).unsharded);
  }

  // Ends the oldest reduction, unless the buffer has dropped its begin.
  void FinishReduction(const Record& action) {
    if (reductions_.empty() || reductions_.front().unit != action.name) return;
    const Reduction done = reductions_.front();
    reductions_.pop_front();
    const int64_t bytes = buffer_.unit_bytes(done.unit).reduce_buffer;
    memory_.reduce_buffers -= bytes;
    NoteMemory(action.end_ns);
    if (done.begin_ns == 0) return;
    Add(TraceCategory::kReducing, "reduction of", done.unit, done.begin_ns,
        action.end_ns, bytes);
  }

  // --- Events: what computes -------------------------------------------------
  void OnEventBegin(const Record& event) {
    if (events_open_++ == 0 && !running_.empty() &&
        event.begin_ns > computing_since_) {
      const Running& innermost = running_.back();
      Add(innermost.category, Name(innermost.category), innermost.unit,
          computing_since_, event.begin_ns);
    }
    switch (event.scope.event) {
      case EventKind::kPreForward:
        if (!backward_began_ && running_.empty()) {
          forward_began_ = event.begin_ns;
        }
        return;
      case EventKind::kPostForward:
        return Leave(event.name, /*in_backward=*/false);
      case EventKind::kPreBackward:
      case EventKind::kPostBackward:
        if (!backward_began_) backward_began_ = event.begin_ns;
        if (event.scope.event == EventKind::kPostBackward) {
          Leave(event.name, /*in_backward=*/true);
        }
        return;
      case EventKind::kReset:
        return GiveUp(event.begin_ns);
      default:
        return;
    }
  }

  void OnEventEnd(const Record& event) {
    switch (event.scope.event) {
      case EventKind::kPreForward:
        running_.push_back({event.name, backward_began_
                                            ? TraceCategory::kRecompute
                                            : TraceCategory::kForward});
        return;
      case EventKind::kPostForward:
        if (running_.empty()) EndPhase("forward of", forward_began_, event);
        return;
      case EventKind::kPreBackward:
        running_.push_back({event.name, TraceCategory::kBackward});
        return;
      case EventKind::kEndOfBackward:
        EndPhase("backward of", backward_began_, event);
        // A unit without anything trainable does not report its end.
        running_.erase(std::remove_if(running_.begin(), running_.end(),
                                      [](const Running& running) {
                                        return running.category ==
                                               TraceCategory::kBackward;
                                      }),
                       running_.end());
        return;
      default:
        return;
    }
  }

  // Looks for the unit: in a graph that is no chain, units may end in another
  // order than the reverse of their begins.
  void Leave(int unit, bool in_backward) {
    for (size_t i = running_.size(); i-- > 0;) {
      const bool is_backward = running_[i].category == TraceCategory::kBackward;
      if (running_[i].unit != unit || is_backward != in_backward) continue;
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }

  void EndPhase(absl::string_view what, std::optional<int64_t>& began,
                const Record& event) {
    if (!began) return;
    Add(TraceCategory::kPhase, what, event.name,
        *std::exchange(began, std::nullopt), event.end_ns);
  }

  // The iteration was given up: nothing runs, is in flight or in memory.
  void GiveUp(int64_t now_ns) {
    given_up_ = true;
    running_.clear();
    forward_began_.reset();
    backward_began_.reset();
    units_.clear();
    reductions_.clear();
    memory_.unsharded = memory_.reduce_buffers = 0;
    NoteMemory(now_ns);
  }

  const TraceBuffer& buffer_;
  TraceTimeline timeline_;
  absl::flat_hash_map<int, UnitState> units_;
  std::deque<Reduction> reductions_;  // oldest first
  TraceTimeline::Memory memory_ = {0, 0, 0};
  std::vector<Running> running_;  // the innermost last
  int events_open_ = 0;
  bool given_up_ = false;  // by the event that is open
  int64_t computing_since_ = 0;
  std::optional<int64_t> forward_began_;
  std::optional<int64_t> backward_began_;
};

// Drops spans from before `first_ns`, but keeps the memory in use at that time.
void StartAt(int64_t first_ns, TraceTimeline& timeline) {
  std::vector<Span>& spans = timeline.spans;
  spans.erase(std::remove_if(spans.begin(), spans.end(),
                             [first_ns](const Span& span) {
                               return span.begin_ns < first_ns;
                             }),
              spans.end());
  std::vector<TraceTimeline::Memory>& memory = timeline.memory;
  auto kept = std::find_if(memory.begin(), memory.end(),
                           [first_ns](const TraceTimeline::Memory& sample) {
                             return sample.time_ns >= first_ns;
                           });
  if (kept != memory.begin()) {
    --kept;
    kept->time_ns = first_ns;
  }
  memory.erase(memory.begin(), kept);
}

void AssignLanes(TraceCategory category, std::vector<Span>& spans) {
  std::vector<int64_t> busy_until;
  for (Span& span : spans) {
    if (span.category != category) continue;
    size_t lane = 0;
    while (lane < busy_until.size() && busy_until[lane] > span.begin_ns) {
      ++lane;
    }
    if (lane == busy_until.size()) busy_until.push_back(0);
    busy_until[lane] = span.end_ns;
    span.lane = static_cast<int>(lane);
  }
}

}  // namespace

TraceTimeline MakeTimeline(const TraceBuffer& buffer, int64_t last_steps) {
  std::vector<int64_t> steps;  // their begins
  for (const Record& record : buffer.Records()) {
    if (record.scope.kind != TraceScope::Kind::kStep) continue;
    steps.push_back(record.begin_ns);
  }
  const int64_t count = static_cast<int64_t>(steps.size());
  const bool all = last_steps == 0 || count < last_steps;
  TraceTimeline timeline = Builder(buffer).Build();
  StartAt(all ? std::numeric_limits<int64_t>::min() : steps[count - last_steps],
          timeline);
  // Outer spans come before those inside them.
  std::stable_sort(timeline.spans.begin(), timeline.spans.end(),
                   [](const Span& a, const Span& b) {
                     return std::pair(a.begin_ns, b.end_ns) <
                            std::pair(b.begin_ns, a.end_ns);
                   });
  AssignLanes(TraceCategory::kGathering, timeline.spans);
  AssignLanes(TraceCategory::kReducing, timeline.spans);
  return timeline;
}

namespace {

// Bounds the memory of a program that makes up names as it goes.
constexpr size_t kMostNames = 1 << 16;
constexpr absl::string_view kNameBeyondThose = "(one of very many names)";

// Returns whether `kind` names a value up to `last`, and sets `found` to it.
template <typename Kind>
bool Find(absl::string_view kind, Kind last, Kind& found) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    found = static_cast<Kind>(i);
    if (kind == Name(found)) return true;
  }
  return false;
}

}  // namespace

NamedScope ParseScope(absl::string_view range) {
  NamedScope user = {{TraceScope::Kind::kUser}, range};
  absl::string_view rest = range;
  if (!absl::ConsumePrefix(&rest, "fsdp::")) return user;
  const size_t open = rest.find('(');
  if (open == absl::string_view::npos || rest.back() != ')') return user;
  const absl::string_view kind = rest.substr(0, open);
  NamedScope parsed = {{TraceScope::Kind::kAction},
                       rest.substr(open + 1, rest.size() - open - 2)};
  if (Find(kind, ActionKind::kCloseShards, parsed.scope.action)) return parsed;
  parsed.scope.kind = TraceScope::Kind::kEvent;
  if (Find(kind, EventKind::kRelease, parsed.scope.event)) return parsed;
  parsed.scope.kind = TraceScope::Kind::kOrderCheck;
  if (kind == "CheckOrder") return parsed;
  return user;
}

TraceBuffer::TraceBuffer(int64_t capacity) : ring_(capacity) {
  FSDP_CHECK(capacity >= 1);
}

int TraceBuffer::IndexOf(absl::string_view name) {
  auto found = indices_.find(name);
  if (found != indices_.end()) return found->second;
  if (names_.size() >= kMostNames && name != kNameBeyondThose) {
    return IndexOf(kNameBeyondThose);
  }
  const int index = static_cast<int>(names_.size());
  names_.emplace_back(name);
  bytes_.emplace_back();
  indices_.emplace(names_.back(), index);
  return index;
}

void TraceBuffer::Begin(TraceScope scope, absl::string_view name,
                        int64_t now_ns) {
  open_.push_back({scope, IndexOf(name), next_sequence_++, now_ns, now_ns});
}

void TraceBuffer::End(int64_t now_ns) {
  if (open_.empty()) return;
  Record record = open_.back();
  open_.pop_back();
  // A wall clock may be set back.
  record.end_ns = std::max(record.begin_ns, now_ns);
  ring_[next_] = record;
  next_ = (next_ + 1) % ring_.size();
  if (size_ < ring_.size()) {
    ++size_;
  } else {
    ++num_dropped_;
  }
}

void TraceBuffer::SetUnitBytes(absl::string_view unit, UnitBytes bytes) {
  bytes_[IndexOf(unit)] = bytes;
}

std::vector<TraceBuffer::Record> TraceBuffer::Records() const {
  const auto at = [](auto& list, size_t i) {
    return list.begin() + static_cast<std::ptrdiff_t>(i);
  };
  std::vector<Record> records(ring_.begin(), at(ring_, size_));
  // In a full ring, the next record replaces the oldest.
  if (size_ == ring_.size()) {
    std::rotate(records.begin(), at(records, next_), records.end());
  }
  return records;
}

const char* Name(TraceCategory category) {
  static constexpr const char* kNames[] = {
      "forward",   "recompute",   "backward", "gather wait", "reduce wait",
      "fence",     "agreement",   "copy",     "start",       "free",
      "optimizer", "bookkeeping", "user",     "phase",       "step",
      "gathering", "reducing"};
  static_assert(std::size(kNames) ==
                static_cast<int>(TraceCategory::kReducing) + 1);
  return kNames[static_cast<int>(category)];
}

namespace {

// Rows of the rank in a viewer, from top to bottom. Collectives in flight come
// last, in as many rows as there are lanes.
enum Row {
  kStepRow = 1,
  kComputeRow,
  kWaitRow,
  kLibraryRow,
  kGatheringRow = 100,
  kReducingRow = 200,
};

// Goes by the groups of TraceCategory.
int RowOf(const Span& span) {
  if (span.category <= TraceCategory::kBackward) return kComputeRow;
  if (span.category <= TraceCategory::kAgreement) return kWaitRow;
  if (span.category <= TraceCategory::kBookkeeping) return kLibraryRow;
  if (span.category <= TraceCategory::kStep) return kStepRow;
  return span.lane + (span.category == TraceCategory::kGathering
                          ? kGatheringRow
                          : kReducingRow);
}

std::string NameOf(int row) {
  if (row >= kReducingRow) {
    return absl::StrCat("reductions in flight ", row - kReducingRow + 1);
  }
  if (row >= kGatheringRow) {
    return absl::StrCat("gathers in flight ", row - kGatheringRow + 1);
  }
  return row == kStepRow      ? "steps"
         : row == kComputeRow ? "compute"
         : row == kWaitRow    ? "exposed communication"
                              : "fsdp";
}

std::string Quoted(absl::string_view text) { return Json(text).ToString(); }

class Writer {
 public:
  explicit Writer(const TraceOfRank& of) : of_(of) {}

  std::string Write(const TraceTimeline& timeline) {
    Metadata("fsdp_trace", 0,
             absl::StrCat("\"version\":1,\"base_ns\":\"", of_.base_ns,
                          "\",\"dropped\":", of_.num_dropped));
    Metadata("process_name", 0,
             absl::StrCat("\"name\":\"rank ", of_.rank, "\""));
    Metadata("process_sort_index", 0,
             absl::StrCat("\"sort_index\":", of_.rank));
    std::set<int> rows;
    for (const Span& span : timeline.spans) rows.insert(RowOf(span));
    for (const int row : rows) {
      Metadata("thread_name", row,
               absl::StrCat("\"name\":", Quoted(NameOf(row))));
      Metadata("thread_sort_index", row, absl::StrCat("\"sort_index\":", row));
    }
    for (const Span& span : timeline.spans) Complete(span);
    for (const TraceTimeline::Memory& sample : timeline.memory) {
      Counter("unsharded parameters", sample.time_ns, sample.unsharded);
      Counter("reduce buffers", sample.time_ns, sample.reduce_buffers);
    }
    return std::move(text_);
  }

 private:
  void Begin() {
    if (!text_.empty()) text_ += ",\n";
  }

  void Metadata(absl::string_view name, int row, absl::string_view args) {
    Begin();
    absl::StrAppend(&text_, "{\"ph\":\"M\",\"name\":\"", name,
                    "\",\"pid\":", of_.rank, ",\"tid\":", row, ",\"args\":{",
                    args, "}}");
  }

  void Complete(const Span& span) {
    Begin();
    absl::StrAppend(
        &text_, "{\"ph\":\"X\",\"name\":", Quoted(span.name), ",\"cat\":\"",
        Name(span.category), "\",\"pid\":", of_.rank, ",\"tid\":", RowOf(span),
        ",\"ts\":", Micros(span.begin_ns - of_.base_ns),
        ",\"dur\":", Micros(span.end_ns - span.begin_ns), ",\"args\":{");
    absl::string_view comma;
    if (span.category == TraceCategory::kStep) {
      absl::StrAppend(&text_, "\"step\":", span.step);
      comma = ",";
    }
    if (!span.unit.empty()) {
      absl::StrAppend(&text_, comma, "\"unit\":", Quoted(span.unit));
      comma = ",";
    }
    if (span.bytes > 0)
      absl::StrAppend(&text_, comma, "\"bytes\":", span.bytes);
    text_ += "}}";
  }

  void Counter(absl::string_view name, int64_t time_ns, int64_t bytes) {
    Begin();
    absl::StrAppend(&text_, "{\"ph\":\"C\",\"name\":\"", name,
                    "\",\"pid\":", of_.rank,
                    ",\"ts\":", Micros(time_ns - of_.base_ns),
                    ",\"args\":{\"bytes\":", bytes, "}}");
  }

  static std::string Micros(int64_t ns) {
    const int64_t size = ns < 0 ? -ns : ns;
    return absl::StrFormat("%s%d.%03d", ns < 0 ? "-" : "", size / 1000,
                           size % 1000);
  }

  const TraceOfRank& of_;
  std::string text_;
};

}  // namespace

std::string TraceEvents(const TraceTimeline& timeline, const TraceOfRank& of) {
  return Writer(of).Write(timeline);
}

std::string TraceFile(absl::Span<const std::string> events) {
  return absl::StrCat("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n",
                      absl::StrJoin(events, ",\n"), "\n]}\n");
}

}  // namespace fsdp
