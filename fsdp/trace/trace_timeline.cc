#include "fsdp/trace/trace_timeline.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"

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

// Follows the scopes in the order in which they began and ended.
class Builder {
 public:
  explicit Builder(const TraceBuffer& buffer) : buffer_(buffer) {}

  TraceTimeline Build(int64_t first_ns) {
    std::vector<Record> records = buffer_.Records();
    // A scope is around another when it began before and ended behind it.
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
    return Finish(first_ns);
  }

 private:
  struct Running {
    int unit;
    TraceCategory category;
  };
  struct Reduction {
    int unit;
    int64_t begin_ns;  // of the collective; 0: only filled
  };
  struct UnitState {
    bool is_gathered = false;  // or being gathered
    std::optional<int64_t> gather_began;
    bool has_whole_gradients = false;
  };

  void Add(TraceCategory category, absl::string_view what, int unit,
           int64_t begin_ns, int64_t end_ns, int64_t bytes = 0) {
    const std::string& name = buffer_.name(unit);
    timeline_.spans.push_back({category, absl::StrCat(what, " ", name), name,
                               begin_ns, end_ns, bytes});
  }

  void OnBegin(const Record& record) {
    switch (record.scope.kind) {
      case TraceScope::Kind::kEvent:
        if (events_open_++ == 0) StopComputing(record.begin_ns);
        Add(TraceCategory::kBookkeeping, Name(record.scope.event), record.name,
            record.begin_ns, record.end_ns);
        return OnEventBegin(record);
      case TraceScope::Kind::kAction:
        return OnActionBegin(record);
      case TraceScope::Kind::kOrderCheck:
        return Add(TraceCategory::kAgreement, "CheckOrder", record.name,
                   record.begin_ns, record.end_ns);
      case TraceScope::Kind::kUser:
        timeline_.spans.push_back({TraceCategory::kUser,
                                   buffer_.name(record.name), "",
                                   record.begin_ns, record.end_ns});
        return;
      case TraceScope::Kind::kStep:
        timeline_.spans.push_back(
            {TraceCategory::kStep, absl::StrCat("step ", record.scope.step), "",
             record.begin_ns, record.end_ns, 0, record.scope.step});
        return;
    }
  }

  void OnEnd(const Record& record) {
    if (record.scope.kind == TraceScope::Kind::kAction) OnActionEnd(record);
    if (record.scope.kind != TraceScope::Kind::kEvent) return;
    if (!given_up_) OnEventEnd(record);
    if (--events_open_ > 0) return;
    given_up_ = false;
    computing_since_ = record.end_ns;
  }

  // --- Which unit computes --------------------------------------------------

  void StopComputing(int64_t now_ns) {
    if (!running_.empty() && now_ns > computing_since_) {
      const Running& innermost = running_.back();
      Add(innermost.category, Name(innermost.category), innermost.unit,
          computing_since_, now_ns);
    }
  }

  // Units that end in another order than they began in reverse are those of a
  // graph that is no chain.
  void Leave(int unit, bool in_backward) {
    for (size_t i = running_.size(); i-- > 0;) {
      const bool is_backward = running_[i].category == TraceCategory::kBackward;
      if (running_[i].unit != unit || is_backward != in_backward) continue;
      running_.erase(running_.begin() + i);
      return;
    }
  }

  void OnEventBegin(const Record& record) {
    switch (record.scope.event) {
      case EventKind::kPreForward:
        if (!backward_began_ && running_.empty()) {
          forward_began_ = record.begin_ns;
        }
        return;
      case EventKind::kPostForward:
        return Leave(record.name, /*in_backward=*/false);
      case EventKind::kPreBackward:
      case EventKind::kPostBackward:
        if (!backward_began_) backward_began_ = record.begin_ns;
        if (record.scope.event == EventKind::kPostBackward) {
          Leave(record.name, /*in_backward=*/true);
        }
        return;
      case EventKind::kReset:
        return GiveUp(record.begin_ns);
      default:
        return;
    }
  }

  void OnEventEnd(const Record& record) {
    switch (record.scope.event) {
      case EventKind::kPreForward:
        running_.push_back({record.name, backward_began_
                                             ? TraceCategory::kRecompute
                                             : TraceCategory::kForward});
        return;
      case EventKind::kPostForward:
        if (!running_.empty() || !forward_began_) return;
        Add(TraceCategory::kPhase, "forward of", record.name, *forward_began_,
            record.end_ns);
        forward_began_.reset();
        return;
      case EventKind::kPreBackward:
        running_.push_back({record.name, TraceCategory::kBackward});
        return;
      case EventKind::kEndOfBackward:
        if (backward_began_) {
          Add(TraceCategory::kPhase, "backward of", record.name,
              *backward_began_, record.end_ns);
        }
        backward_began_.reset();
        // A unit without anything trainable does not say that it is done.
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

  // --- Communication and its memory -----------------------------------------

  void NoteMemory(int64_t now_ns) {
    memory_.time_ns = now_ns;
    timeline_.memory.push_back(memory_);
  }

  void OnActionBegin(const Record& record) {
    const int unit = record.name;
    const ActionKind kind = record.scope.action;
    const TraceBuffer::UnitBytes bytes = buffer_.unit_bytes(unit);
    UnitState& state = units_[unit];
    int64_t moved = 0;
    switch (kind) {
      case ActionKind::kGather:
      case ActionKind::kGatherCopy:
        moved = bytes.unsharded;
        if (!state.is_gathered) memory_.unsharded += bytes.unsharded;
        state.is_gathered = true;
        state.gather_began = record.begin_ns;
        NoteMemory(record.begin_ns);
        break;
      case ActionKind::kAccumulate:
        moved = bytes.reduce_buffer;
        if (!state.has_whole_gradients) AddReduceBuffer(record);
        state.has_whole_gradients = true;
        break;
      case ActionKind::kFillReduceBuffer:
        moved = bytes.reduce_buffer;
        if (!state.has_whole_gradients) AddReduceBuffer(record);
        state.has_whole_gradients = false;
        reductions_.push_back({unit, 0});
        break;
      case ActionKind::kReduce:
        moved = bytes.reduce_buffer;
        if (!reductions_.empty()) {
          reductions_.back().begin_ns = record.begin_ns;
        }
        break;
      default:
        break;
    }
    Add(CategoryOf(kind), Name(kind), unit, record.begin_ns, record.end_ns,
        moved);
  }

  void AddReduceBuffer(const Record& record) {
    memory_.reduce_buffers += buffer_.unit_bytes(record.name).reduce_buffer;
    NoteMemory(record.begin_ns);
  }

  void OnActionEnd(const Record& record) {
    switch (record.scope.action) {
      case ActionKind::kWaitGather:
        return FinishGather(record);
      case ActionKind::kFree:
      case ActionKind::kShrink:
        FinishGather(record);
        if (!units_[record.name].is_gathered) return;
        units_[record.name].is_gathered = false;
        memory_.unsharded -= buffer_.unit_bytes(record.name).unsharded;
        return NoteMemory(record.end_ns);
      case ActionKind::kKeepSums:
      case ActionKind::kWaitReduce:
        return FinishReduction(record);
      default:
        return;
    }
  }

  void FinishGather(const Record& record) {
    std::optional<int64_t>& began = units_[record.name].gather_began;
    if (!began) return;
    Add(TraceCategory::kGathering, "all-gather of", record.name, *began,
        record.end_ns, buffer_.unit_bytes(record.name).unsharded);
    began.reset();
  }

  // Of the oldest, unless the buffer has dropped how it began.
  void FinishReduction(const Record& record) {
    if (reductions_.empty() || reductions_.front().unit != record.name) return;
    const Reduction done = reductions_.front();
    reductions_.pop_front();
    const int64_t bytes = buffer_.unit_bytes(done.unit).reduce_buffer;
    memory_.reduce_buffers -= bytes;
    NoteMemory(record.end_ns);
    if (done.begin_ns == 0) return;
    Add(TraceCategory::kReducing, "reduction of", done.unit, done.begin_ns,
        record.end_ns, bytes);
  }

  // --- The end --------------------------------------------------------------

  TraceTimeline Finish(int64_t first_ns) {
    std::vector<Span>& spans = timeline_.spans;
    spans.erase(std::remove_if(spans.begin(), spans.end(),
                               [first_ns](const Span& span) {
                                 return span.begin_ns < first_ns;
                               }),
                spans.end());
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span& a, const Span& b) {
                       if (a.begin_ns != b.begin_ns) {
                         return a.begin_ns < b.begin_ns;
                       }
                       return a.end_ns > b.end_ns;
                     });
    AssignLanes(TraceCategory::kGathering);
    AssignLanes(TraceCategory::kReducing);
    std::vector<TraceTimeline::Memory>& memory = timeline_.memory;
    auto kept = std::find_if(memory.begin(), memory.end(),
                             [first_ns](const TraceTimeline::Memory& sample) {
                               return sample.time_ns >= first_ns;
                             });
    if (kept != memory.begin()) {
      --kept;
      kept->time_ns = first_ns;  // what there was by then
    }
    memory.erase(memory.begin(), kept);
    return std::move(timeline_);
  }

  void AssignLanes(TraceCategory category) {
    std::vector<int64_t> busy_until;
    for (Span& span : timeline_.spans) {
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

  const TraceBuffer& buffer_;
  TraceTimeline timeline_;
  std::vector<Running> running_;  // the innermost last
  int events_open_ = 0;
  bool given_up_ = false;  // in the event that is open
  int64_t computing_since_ = 0;
  std::optional<int64_t> forward_began_;
  std::optional<int64_t> backward_began_;
  absl::flat_hash_map<int, UnitState> units_;
  std::deque<Reduction> reductions_;  // oldest first
  TraceTimeline::Memory memory_ = {0, 0, 0};
};

}  // namespace

TraceTimeline MakeTimeline(const TraceBuffer& buffer, int64_t last_steps) {
  std::vector<int64_t> steps;  // when they began
  for (const Record& record : buffer.Records()) {
    if (record.scope.kind != TraceScope::Kind::kStep) continue;
    steps.push_back(record.begin_ns);
  }
  const int64_t count = static_cast<int64_t>(steps.size());
  const bool all = last_steps == 0 || count < last_steps;
  return Builder(buffer).Build(all ? std::numeric_limits<int64_t>::min()
                                   : steps[count - last_steps]);
}

}  // namespace fsdp
