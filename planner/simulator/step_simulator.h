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

// The times at which a rank does what: one timeline of its compute, one of the
// network.

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

// Times are in seconds since the step began; no span is empty. kGather, kReduce
// and kReplicate are on the network's timeline, in the order of their start;
// all others are on compute's, one after the other without gaps.
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
  // Starts communication behind what was started before, and returns when it
  // will be done. If `seconds` is 0 it takes no time.
  double Communicate(SpanKind kind, int unit, double seconds);
  // Makes compute wait until `time`, and returns for how long it waits.
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

// Seconds and bytes of a unit or a whole step on one rank.
struct Spent {
  double compute = 0;
  double copies = 0;
  double optimizer = 0;
  double gather = 0;  // communication
  double reduce = 0;  // communication, that over copies included
  // The time that compute waits for these.
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
  double seconds = 0;  // compute, copies, optimizer and exposed together
  Spent total;
  std::vector<Spent> units;
  MemoryPlan peak;  // the most bytes alive, of each kind
  std::vector<Span> timeline;
};

// Simulates the second step of a training: the first one records the order by
// which later ones prefetch. `sharded` is that of `model`. InvalidArgument: a
// number in `options` is too small, or the optimizer state is negative.
absl::StatusOr<StepResult> SimulateStep(const ModelShape& model,
                                        const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options);

// Carries out the actions of one rank's schedule as the runtime does, in their
// order, and counts the time of these and of compute.
class RankClock {
 public:
  // `optimizer_state` is the bytes of states per byte of shard. References
  // outlive this.
  RankClock(const ShardedShape& sharded, const CostModel& costs,
            double optimizer_state)
      : sharded_(sharded),
        costs_(costs),
        optimizer_state_(optimizer_state),
        states_(sharded.units.size()),
        spent_(sharded.units.size()) {}

  // Sets the clock to 0; what is in flight and in memory stays.
  void Restart();

  void Execute(const Action& action);
  // Computes the part `share` of `work`.
  void Compute(SpanKind kind, int unit, const Work& work, double share);
  void StepOptimizer(int unit);

  const Timeline& timeline() const { return timeline_; }
  // By unit.
  const std::vector<Spent>& spent() const { return spent_; }

 private:
  struct UnitState {
    double gathered_at = 0;        // the end of the gather in flight
    bool copy_is_current = false;  // the copy in memory that ranks share
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

// Everything on which a simulated step depends.

struct Scenario {
  ModelShape model;
  ShardingOptions sharding;
  CostOptions costs;
  StepOptions step;
};

// InvalidArgument: one of the parts is refused.
absl::StatusOr<StepResult> Simulate(const Scenario& scenario);

}  // namespace fsdp::simulator

#endif  // PLANNER_SIMULATOR_STEP_SIMULATOR_H_
