// The time that one rank spends on what it computes and on what its schedule
// asks for.
#ifndef FSDP_SIMULATOR_RANK_CLOCK_H_
#define FSDP_SIMULATOR_RANK_CLOCK_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "fsdp/describe/memory_plan.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/simulator/cost_model.h"
#include "fsdp/simulator/sharding.h"
#include "fsdp/simulator/step_simulator.h"
#include "fsdp/simulator/timeline.h"

namespace fsdp::simulator {

// Carries out actions as the runtime does, in the order in which they come.
class RankClock {
 public:
  // Of optimizer states, `optimizer_state` bytes per byte of shard. What it
  // takes by reference outlives this.
  RankClock(const ShardedShape& sharded, const CostModel& costs,
            double optimizer_state)
      : sharded_(sharded),
        costs_(costs),
        optimizer_state_(optimizer_state),
        states_(sharded.units.size()),
        spent_(sharded.units.size()) {}

  // From 0 on, with what is in flight and in memory as it is.
  void Restart();

  void Execute(const Action& action);
  // `share` of `work`.
  void Compute(SpanKind kind, int unit, const Work& work, double share);
  void StepOptimizer(int unit);

  const Timeline& timeline() const { return timeline_; }
  // By unit.
  const std::vector<Spent>& spent() const { return spent_; }

 private:
  struct UnitState {
    double gathered_at = 0;        // when the gather in flight is done
    bool copy_is_current = false;  // of memory that ranks share
    bool has_part = false;
    bool has_whole_gradients = false;
  };
  struct Reduction {
    int unit;
    double done_at;
  };

  int64_t OptimizerState(const UnitBytes& unit) const;
  void PassFence(int unit);
  void Gather(int unit);
  void FillBuffer(int unit);
  void Reduce(int unit);
  void Replicate(int unit);
  void StartReduction(SpanKind kind, int unit, double seconds);
  void WaitReduce(int unit);
  void Copy(int unit, int64_t bytes);

  const ShardedShape& sharded_;
  const CostModel& costs_;
  const double optimizer_state_;
  std::vector<UnitState> states_;
  std::deque<Reduction> reductions_;  // oldest first

  double reduced_at_ = 0;  // when the reduction started last will be done
  Timeline timeline_;
  std::vector<Spent> spent_;
};

}  // namespace fsdp::simulator

#endif  // FSDP_SIMULATOR_RANK_CLOCK_H_
