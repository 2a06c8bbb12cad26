#include <algorithm>
#include <deque>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {
namespace {

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
        states_(sharded.units.size()) {}

  // Sets the clock to 0; what is in flight and in memory stays.
  void Restart() {
    spent_ = Spent();
    now_ = network_free_ = 0;
  }

  void Execute(const Action& action) {
    const int unit = action.unit;
    const UnitBytes& bytes = sharded_.bytes[unit];
    switch (action.kind) {
      case ActionKind::kLoad:  // shards rest on the device
        return;
      case ActionKind::kGather:
      case ActionKind::kGatherCopy:  // only users ask for one
        return Gather(unit);
      case ActionKind::kWaitGather:
        spent_.exposed_gather += WaitUntil(states_[unit].gathered_at);
        return;
      case ActionKind::kFree:
        return;
      case ActionKind::kShrink:
        states_[unit].has_part = true;
        return Copy(2 * bytes.part);
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
      case ActionKind::kKeepSums:  // only users ask for it
      case ActionKind::kReplicateSums:
        return;
      case ActionKind::kStep:
        return StepOptimizer(unit);
      case ActionKind::kOpenShards:
        for (auto& state : states_) state.copy_is_current = false;
        return PassFence();
      case ActionKind::kCloseShards:
        return PassFence();
    }
  }

  // Computes the part `share` of `work`.
  void Compute(const Work& work, double share) {
    const double seconds = share * costs_.ComputeSeconds(work);
    spent_.compute += seconds;
    now_ += seconds;
  }

  // Counts reading the gradient, and reading and writing parameters and state.
  void StepOptimizer(int unit) {
    const UnitBytes& bytes = sharded_.bytes[unit];
    if (!bytes.trainable) return;
    const auto shard = static_cast<double>(bytes.shard);
    const double seconds =
        costs_.MemorySeconds(3 * shard + 2 * optimizer_state_ * shard);
    spent_.optimizer += seconds;
    now_ += seconds;
  }

  // The time that compute has come to.
  double now() const { return now_; }
  const Spent& spent() const { return spent_; }

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

  void PassFence() {
    spent_.exposed_gather += WaitUntil(now_ + costs_.options().fence_seconds);
  }

  // Follows Runtime::GatherFlat() and GatherShared().
  void Gather(int unit) {
    const UnitMessages& messages = sharded_.messages[unit];
    if (sharded_.units[unit].shares_memory) {
      states_[unit].gathered_at = 0;
      if (!sharded_.casts || states_[unit].copy_is_current) return;
      states_[unit].copy_is_current = true;
    }
    const bool from_part = states_[unit].has_part;
    const Group& group = from_part ? sharded_.part : sharded_.shard;
    if (!from_part && sharded_.casts) {
      Copy(sharded_.bytes[unit].shard + messages.gather / sharded_.shard.size);
    }
    const double seconds = costs_.CollectiveSeconds(Collective::kAllGather,
                                                    group, messages.gather);
    spent_.gathered_bytes +=
        costs_.BytesSent(Collective::kAllGather, group, messages.gather);
    states_[unit].gathered_at = Communicate(seconds);
    if (!costs_.options().overlap) {
      spent_.exposed_gather += WaitUntil(states_[unit].gathered_at);
    }
  }

  // Follows FlatGradients::Fill() and Add().
  void FillBuffer(int unit) {
    const UnitMessages& messages = sharded_.messages[unit];
    if (states_[unit].has_whole_gradients) {
      return Copy(messages.gradients + 2 * messages.reduce);
    }
    if (sharded_.bytes[unit].takes_gradients) return;
    Copy(messages.gradients + messages.reduce);
  }

  void Reduce(int unit) {
    const int64_t bytes = sharded_.messages[unit].reduce;
    const double seconds = costs_.CollectiveSeconds(Collective::kReduceScatter,
                                                    sharded_.shard, bytes);
    spent_.reduced_bytes +=
        costs_.BytesSent(Collective::kReduceScatter, sharded_.shard, bytes);
    StartReduction(seconds);
    reductions_.push_back({unit, reduced_at_});
  }

  // Waits for the reduce-scatter, as the runtime does.
  void Replicate(int unit) {
    const auto reduction = absl::c_find_if(
        reductions_,
        [unit](const Reduction& other) { return other.unit == unit; });
    FSDP_CHECK(reduction != reductions_.end());
    spent_.exposed_reduce += WaitUntil(reduction->done_at);
    const int64_t bytes = sharded_.messages[unit].segment;
    const double seconds = costs_.CollectiveSeconds(Collective::kAllReduce,
                                                    sharded_.replicate, bytes);
    spent_.replicated_bytes +=
        costs_.BytesSent(Collective::kAllReduce, sharded_.replicate, bytes);
    StartReduction(seconds);
    reduction->done_at = reduced_at_;
  }

  void StartReduction(double seconds) {
    reduced_at_ = Communicate(seconds);
    if (!costs_.options().overlap) {
      spent_.exposed_reduce += WaitUntil(reduced_at_);
    }
  }

  // Follows FlatGradients::AccumulateMean().
  void WaitReduce(int unit) {
    FSDP_CHECK(!reductions_.empty() && reductions_.front().unit == unit);
    spent_.exposed_reduce += WaitUntil(reductions_.front().done_at);
    reductions_.pop_front();
    const bool direct =
        sharded_.units[unit].shares_memory && !sharded_.units[unit].replicated;
    if (direct || sharded_.bytes[unit].takes_gradients) return;
    Copy(sharded_.messages[unit].segment + sharded_.bytes[unit].shard);
  }

  void Copy(int64_t bytes) {
    const double seconds = costs_.MemorySeconds(static_cast<double>(bytes));
    spent_.copies += seconds;
    now_ += seconds;
  }

  // Starts communication behind what was started before, and returns when it
  // will be done. If `seconds` is 0 it takes no time.
  double Communicate(double seconds) {
    if (seconds == 0) return now_;
    network_free_ = std::max(now_, network_free_) + seconds;
    return network_free_;
  }

  // Makes compute wait until `time`, and returns for how long it waits.
  double WaitUntil(double time) {
    const double begin = now_;
    now_ = std::max(now_, time);
    return now_ - begin;
  }

  const ShardedShape& sharded_;
  const CostModel& costs_;
  const double optimizer_state_;
  std::vector<UnitState> states_;
  std::deque<Reduction> reductions_;  // oldest first

  double reduced_at_ = 0;    // when the reduction started last will be done
  double now_ = 0;           // of compute
  double network_free_ = 0;  // when all that was started is done
  Spent spent_;
};

// Runs the model on one rank and reports to the rank's schedule.
class Rank {
 public:
  Rank(const ShardedShape& sharded, const CostModel& costs,
       const StepOptions& options)
      : sharded_(sharded),
        options_(options),
        schedule_(sharded.units, options.schedule),
        children_(sharded.units.size()),
        clock_(sharded, costs, options.memory.optimizer_state) {
    for (size_t i = 1; i < sharded.units.size(); ++i) {
      children_[sharded.units[i].parent].push_back(static_cast<int>(i));
    }
  }

  absl::Status Step() {
    clock_.Restart();
    const int backwards = options_.memory.backwards_per_step;
    for (int i = 1; i <= backwards; ++i) {
      FSDP_RETURN_IF_ERROR(Forward(0));
      const bool synchronizes = i == backwards;
      FSDP_RETURN_IF_ERROR(Backward(0, synchronizes));
      Event end{EventKind::kEndOfBackward};
      end.synchronizes = synchronizes;
      FSDP_RETURN_IF_ERROR(Report(end));
    }
    if (options_.schedule.step_in_backward) return absl::OkStatus();
    for (size_t i = 0; i < sharded_.units.size(); ++i) {
      clock_.StepOptimizer(static_cast<int>(i));
    }
    return absl::OkStatus();
  }

  StepResult Result() const {
    StepResult result;
    result.ranks = sharded_.ranks;
    result.copies = sharded_.replicate.size;
    result.seconds = clock_.now();
    result.total = clock_.spent();
    result.peak = PlanMemory(sharded_.units, sharded_.bytes, options_.schedule,
                             options_.memory);
    return result;
  }

 private:
  absl::Status Forward(int unit) {
    const UnitWork& work = sharded_.work[unit];
    Event before{EventKind::kPreForward, unit};
    before.records_graph = true;
    FSDP_RETURN_IF_ERROR(Report(before));
    clock_.Compute(work.forward, work.share_before);
    for (int child : children_[unit]) FSDP_RETURN_IF_ERROR(Forward(child));
    clock_.Compute(work.forward, 1 - work.share_before);
    Event after{EventKind::kPostForward, unit};
    after.expects_backward = true;
    return Report(after);
  }

  absl::Status Backward(int unit, bool synchronizes) {
    const UnitWork& work = sharded_.work[unit];
    FSDP_RETURN_IF_ERROR(Report({EventKind::kPreBackward, unit}));
    clock_.Compute(work.backward, 1 - work.share_before);
    const std::vector<int>& children = children_[unit];
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      FSDP_RETURN_IF_ERROR(Backward(*child, synchronizes));
    }
    clock_.Compute(work.backward, work.share_before);
    Event after{EventKind::kPostBackward, unit};
    after.reduces = sharded_.bytes[unit].trainable;
    after.synchronizes = synchronizes;
    return Report(after);
  }

  absl::Status Report(const Event& event) {
    FSDP_ASSIGN_OR_RETURN(const Actions actions, schedule_.Next(event));
    for (const Action& action : actions) clock_.Execute(action);
    return absl::OkStatus();
  }

  const ShardedShape& sharded_;
  const StepOptions& options_;
  Schedule schedule_;
  std::vector<std::vector<int>> children_;
  RankClock clock_;
};

}  // namespace

absl::StatusOr<StepResult> SimulateStep(const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options) {
  FSDP_CHECK(!sharded.units.empty());
  FSDP_CHECK(sharded.units.size() == sharded.work.size());
  if (options.memory.backwards_per_step < 1 ||
      options.schedule.max_reduce_buffers < 1 ||
      options.schedule.max_gathered_units < 0 ||
      !(options.memory.optimizer_state >= 0 &&
        options.memory.optimizer_state <= kMostState)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a step with ", options.memory.backwards_per_step, " backwards, ",
        options.schedule.max_reduce_buffers, " reduce buffers, ",
        options.schedule.max_gathered_units, " gathered units and ",
        options.memory.optimizer_state,
        " bytes of optimizer state per byte: backwards and buffers are at "
        "least 1, the others at least 0, and the state at most 1e6"));
  }
  Rank rank(sharded, costs, options);
  FSDP_RETURN_IF_ERROR(rank.Step());
  FSDP_RETURN_IF_ERROR(rank.Step());
  return rank.Result();
}

absl::StatusOr<StepResult> Simulate(const Scenario& scenario) {
  FSDP_ASSIGN_OR_RETURN(
      const CostModel costs,
      CostModel::Create(scenario.costs, scenario.sharding.ranks));
  FSDP_ASSIGN_OR_RETURN(const ShardedShape sharded,
                        Shard(scenario.model, scenario.sharding));
  return SimulateStep(sharded, costs, scenario.step);
}

}  // namespace fsdp::simulator
