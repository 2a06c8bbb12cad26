// Runs the schedule of a training step against a clock: what one rank computes,
// what it waits for, and what it has in memory. All ranks do the same at the
// same time.
#ifndef PLANNER_SIMULATOR_STEP_SIMULATOR_H_
#define PLANNER_SIMULATOR_STEP_SIMULATOR_H_

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/describe/memory_plan.h"
#include "fsdp/schedule/schedule.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/sharding.h"

// What a rank does when: one timeline of compute, one of what the network does
// for it meanwhile.

namespace fsdp::simulator {

enum class SpanKind {
  kForward,
  kBackward,
  kCopy,       // casts, gradients into reduce buffers and out of them
  kOptimizer,  // reading and writing what it steps
  kGather,
  kReduce,     // over the ranks that share a copy
  kReplicate,  // over the copies
  kWait,       // compute waits for communication
};
const char* Name(SpanKind kind);

// In seconds since the step began; not empty. kGather, kReduce and kReplicate
// are the network's, in the order of their start; all else is compute's, one
// after the other without gaps.
struct Span {
  SpanKind kind;
  int unit;
  double begin;
  double end;
};

class Timeline {
 public:
  double now() const { return now_; }  // of compute
  const std::vector<Span>& spans() const { return spans_; }

  void Compute(SpanKind kind, int unit, double seconds);
  // Starts behind what was started before; nothing to do takes no time. Returns
  // when it will be done.
  double Communicate(SpanKind kind, int unit, double seconds);
  // Compute waits until `time`. Returns for how long.
  double Wait(int unit, double time);

 private:
  void Add(SpanKind kind, int unit, double begin, double end);

  double now_ = 0;
  double network_free_ = 0;  // when all that was started is done
  std::vector<Span> spans_;
};

struct StepOptions {
  ScheduleOptions schedule;
  // Backwards and optimizer state of a step.
  MemoryPlanOptions memory;
};

// Of a unit or a whole step, on one rank; seconds.
struct Spent {
  double compute = 0;
  double copies = 0;
  double optimizer = 0;
  double gather = 0;  // of communication
  double reduce = 0;  // the same, over replicas, too
  // Waiting for these.
  double exposed_gather = 0;
  double exposed_reduce = 0;
  // Bytes that the rank sends.
  int64_t gathered_bytes = 0;
  int64_t reduced_bytes = 0;
  int64_t replicated_bytes = 0;

  double exposed() const { return exposed_gather + exposed_reduce; }
  int64_t bytes() const {
    return gathered_bytes + reduced_bytes + replicated_bytes;
  }
  void Add(const Spent& other);
};

struct StepResult {
  double seconds = 0;  // compute, copies, optimizer and exposed, together
  Spent total;
  std::vector<Spent> units;
  MemoryPlan peak;  // bytes alive at most, of each kind
  std::vector<Span> timeline;
};

// The second step of a training: the first records the order that later ones
// prefetch by. `sharded` is of `model`. InvalidArgument: numbers below 1 in
// `options`, or a negative optimizer state.
absl::StatusOr<StepResult> SimulateStep(const ModelShape& model,
                                        const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options);

// The time that one rank spends on what it computes and on what its schedule
// asks for.

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

#endif  // PLANNER_SIMULATOR_STEP_SIMULATOR_H_
