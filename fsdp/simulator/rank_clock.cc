#include "fsdp/simulator/rank_clock.h"

#include <algorithm>

#include "base/check.h"

namespace fsdp::simulator {

void RankClock::Restart() {
  spent_.assign(sharded_.units.size(), Spent());
  timeline_ = Timeline();
}

int64_t RankClock::OptimizerState(const UnitBytes& unit) const {
  if (!unit.trainable) return 0;
  return static_cast<int64_t>(optimizer_state_ *
                              static_cast<double>(unit.shard));
}

void RankClock::Execute(const Action& action) {
  const int unit = action.unit;
  const UnitBytes& bytes = sharded_.bytes[unit];
  switch (action.kind) {
    case ActionKind::kLoad:  // shards rest in memory here
      return;
    case ActionKind::kGather:
    case ActionKind::kGatherCopy:  // no user asks for one here
      return Gather(unit);
    case ActionKind::kWaitGather:
      spent_[unit].exposed_gather +=
          timeline_.Wait(unit, states_[unit].gathered_at);
      return;
    case ActionKind::kFree:
      return;
    case ActionKind::kShrink:
      states_[unit].has_part = true;
      return Copy(unit, 2 * bytes.part);
    case ActionKind::kDropPart:
      states_[unit].has_part = false;
      return;
    case ActionKind::kAccumulate:
      FillBuffer(unit);
      states_[unit].has_whole_gradients = true;
      return;
    case ActionKind::kFillReduceBuffer:
      FillBuffer(unit);
      states_[unit].has_whole_gradients = false;
      return;
    case ActionKind::kReduce:
      return Reduce(unit);
    case ActionKind::kReplicate:
      return Replicate(unit);
    case ActionKind::kWaitReduce:
      return WaitReduce(unit);
    case ActionKind::kKeepSums:  // nobody asks for it here
    case ActionKind::kReplicateSums:
      return;
    case ActionKind::kStep:
      return StepOptimizer(unit);
    case ActionKind::kOpenShards:
      for (auto& state : states_) state.copy_is_current = false;
      return PassFence(unit);
    case ActionKind::kCloseShards:
      return PassFence(unit);
  }
}

void RankClock::PassFence(int unit) {
  const double seconds = costs_.options().fence_seconds;
  spent_[unit].gather += seconds;
  spent_[unit].exposed_gather +=
      timeline_.Wait(unit, timeline_.now() + seconds);
}

// Gatherer::GatherFlat() and GatherShared().
void RankClock::Gather(int unit) {
  const UnitMessages& messages = sharded_.messages[unit];
  if (sharded_.units[unit].shares_memory) {
    states_[unit].gathered_at = 0;
    if (!sharded_.casts() || states_[unit].copy_is_current) return;
    states_[unit].copy_is_current = true;
  }
  const bool from_part = states_[unit].has_part;
  const Group& group = from_part ? sharded_.part : sharded_.shard;
  if (!from_part && sharded_.casts()) {
    Copy(unit,
         sharded_.bytes[unit].shard + messages.gather / sharded_.shard.size);
  }
  const double seconds =
      costs_.CollectiveSeconds(Collective::kAllGather, group, messages.gather);
  spent_[unit].gather += seconds;
  spent_[unit].gathered_bytes +=
      costs_.BytesSent(Collective::kAllGather, group, messages.gather);
  states_[unit].gathered_at =
      timeline_.Communicate(SpanKind::kGather, unit, seconds);
  if (!costs_.options().overlap) {
    spent_[unit].exposed_gather +=
        timeline_.Wait(unit, states_[unit].gathered_at);
  }
}

// GradientBuffer::Fill() and Add().
void RankClock::FillBuffer(int unit) {
  const UnitMessages& messages = sharded_.messages[unit];
  if (states_[unit].has_whole_gradients) {
    return Copy(unit, messages.gradients + 2 * messages.reduce);
  }
  Copy(unit, messages.gradients + messages.reduce);
}

void RankClock::Reduce(int unit) {
  const int64_t bytes = sharded_.messages[unit].reduce;
  const double seconds = costs_.CollectiveSeconds(Collective::kReduceScatter,
                                                  sharded_.shard, bytes);
  spent_[unit].reduced_bytes +=
      costs_.BytesSent(Collective::kReduceScatter, sharded_.shard, bytes);
  StartReduction(SpanKind::kReduce, unit, seconds);
  reductions_.push_back({unit, reduced_at_});
}

// Waits for the reduce-scatter, as the runtime does.
void RankClock::Replicate(int unit) {
  const auto reduction = std::find_if(
      reductions_.begin(), reductions_.end(),
      [unit](const Reduction& other) { return other.unit == unit; });
  FSDP_CHECK(reduction != reductions_.end());
  spent_[unit].exposed_reduce += timeline_.Wait(unit, reduction->done_at);
  const int64_t bytes = sharded_.messages[unit].segment;
  const double seconds = costs_.CollectiveSeconds(Collective::kAllReduce,
                                                  sharded_.replicate, bytes);
  spent_[unit].replicated_bytes +=
      costs_.BytesSent(Collective::kAllReduce, sharded_.replicate, bytes);
  StartReduction(SpanKind::kReplicate, unit, seconds);
  reduction->done_at = reduced_at_;
}

void RankClock::StartReduction(SpanKind kind, int unit, double seconds) {
  spent_[unit].reduce += seconds;
  reduced_at_ = timeline_.Communicate(kind, unit, seconds);
  if (!costs_.options().overlap) {
    spent_[unit].exposed_reduce += timeline_.Wait(unit, reduced_at_);
  }
}

// ShardGradient::AccumulateMean().
void RankClock::WaitReduce(int unit) {
  FSDP_CHECK(!reductions_.empty() && reductions_.front().unit == unit);
  spent_[unit].exposed_reduce +=
      timeline_.Wait(unit, reductions_.front().done_at);
  reductions_.pop_front();
  // Sums from shared memory go straight into the gradient.
  const bool direct =
      sharded_.units[unit].shares_memory && !sharded_.units[unit].replicated;
  if (direct) return;
  Copy(unit, sharded_.messages[unit].segment + sharded_.bytes[unit].shard);
}

// Reads the gradient, reads and writes parameters and state.
void RankClock::StepOptimizer(int unit) {
  const UnitBytes& bytes = sharded_.bytes[unit];
  if (!bytes.trainable) return;
  const double seconds = costs_.OptimizerSeconds(static_cast<double>(
      bytes.shard + 2 * (bytes.shard + OptimizerState(bytes))));
  spent_[unit].optimizer += seconds;
  timeline_.Compute(SpanKind::kOptimizer, unit, seconds);
}

void RankClock::Compute(SpanKind kind, int unit, const Work& work,
                        double share) {
  const double seconds = share * costs_.ComputeSeconds(work);
  spent_[unit].compute += seconds;
  timeline_.Compute(kind, unit, seconds);
}

void RankClock::Copy(int unit, int64_t bytes) {
  const double seconds = costs_.CopySeconds(static_cast<double>(bytes));
  spent_[unit].copies += seconds;
  timeline_.Compute(SpanKind::kCopy, unit, seconds);
}

}  // namespace fsdp::simulator
