#include "fsdp/trace/collective_spans.h"

#include "fsdp/schedule/schedule.h"
#include "fsdp/trace/trace_category.h"

namespace fsdp {
namespace {

using Record = TraceBuffer::Record;

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

}  // namespace

void CollectiveSpans::OnActionBegin(const Record& action) {
  const int64_t moved = Start(action);
  const ActionKind kind = action.scope.action;
  spans_->Add(CategoryOf(kind), Name(kind), action.name, action.begin_ns,
              action.end_ns, moved);
}

void CollectiveSpans::OnActionEnd(const Record& action) {
  switch (action.scope.action) {
    case ActionKind::kWaitGather:
      return FinishGather(action);
    case ActionKind::kFree:
    case ActionKind::kShrink:
      FinishGather(action);
      if (!units_[action.name].is_gathered) return;
      units_[action.name].is_gathered = false;
      memory_.unsharded -= buffer_.unit_bytes(action.name).unsharded;
      return NoteMemory(action.end_ns);
    case ActionKind::kKeepSums:
    case ActionKind::kWaitReduce:
      return FinishReduction(action);
    default:
      return;
  }
}

void CollectiveSpans::OnReset(int64_t now_ns) {
  units_.clear();
  reductions_.clear();
  memory_.unsharded = memory_.reduce_buffers = 0;
  NoteMemory(now_ns);
}

// Returns the bytes that the action moves.
int64_t CollectiveSpans::Start(const Record& action) {
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
      if (!state.has_whole_gradients) AddReduceBuffer(action);
      state.has_whole_gradients = true;
      return bytes.reduce_buffer;
    case ActionKind::kFillReduceBuffer:
      if (!state.has_whole_gradients) AddReduceBuffer(action);
      state.has_whole_gradients = false;
      reductions_.push_back({action.name, 0});
      return bytes.reduce_buffer;
    case ActionKind::kReduce:
      if (!reductions_.empty()) reductions_.back().begin_ns = action.begin_ns;
      return bytes.reduce_buffer;
    default:
      return 0;
  }
}

void CollectiveSpans::NoteMemory(int64_t now_ns) {
  memory_.time_ns = now_ns;
  samples_->push_back(memory_);
}

void CollectiveSpans::AddReduceBuffer(const Record& action) {
  memory_.reduce_buffers += buffer_.unit_bytes(action.name).reduce_buffer;
  NoteMemory(action.begin_ns);
}

void CollectiveSpans::FinishGather(const Record& action) {
  std::optional<int64_t>& began = units_[action.name].gather_began;
  if (!began) return;
  spans_->Add(TraceCategory::kGathering, "all-gather of", action.name, *began,
              action.end_ns, buffer_.unit_bytes(action.name).unsharded);
  began.reset();
}

// Of the oldest, unless the buffer has dropped how it began.
void CollectiveSpans::FinishReduction(const Record& action) {
  if (reductions_.empty() || reductions_.front().unit != action.name) return;
  const Reduction done = reductions_.front();
  reductions_.pop_front();
  const int64_t bytes = buffer_.unit_bytes(done.unit).reduce_buffer;
  memory_.reduce_buffers -= bytes;
  NoteMemory(action.end_ns);
  if (done.begin_ns == 0) return;
  spans_->Add(TraceCategory::kReducing, "reduction of", done.unit,
              done.begin_ns, action.end_ns, bytes);
}

}  // namespace fsdp
