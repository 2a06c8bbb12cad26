#include "fsdp/simulator/step_simulator.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "fsdp/simulator/rank_clock.h"

namespace fsdp::simulator {
namespace {

// One rank that runs the model and reports to its schedule.
class Rank {
 public:
  Rank(const ModelShape& model, const ShardedShape& sharded,
       const CostModel& costs, const StepOptions& options)
      : model_(model),
        sharded_(sharded),
        options_(options),
        schedule_(sharded.units, options.schedule),
        children_(model.units.size()),
        clock_(sharded, costs, options.memory.optimizer_state) {
    for (size_t i = 1; i < model.units.size(); ++i) {
      children_[model.units[i].parent].push_back(static_cast<int>(i));
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
    for (size_t i = 0; i < model_.units.size(); ++i) {
      clock_.StepOptimizer(static_cast<int>(i));
    }
    return absl::OkStatus();
  }

  StepResult Result() const {
    StepResult result;
    result.seconds = clock_.timeline().now();
    result.units = clock_.spent();
    for (const Spent& unit : result.units) result.total.Add(unit);
    result.peak = PlanMemory(sharded_.units, sharded_.bytes, options_.schedule,
                             options_.memory);
    result.timeline = clock_.timeline().spans();
    return result;
  }

 private:
  absl::Status Forward(int unit) {
    const UnitShape& shape = model_.units[unit];
    Event before{EventKind::kPreForward, unit};
    before.records_graph = true;
    FSDP_RETURN_IF_ERROR(Report(before));
    clock_.Compute(SpanKind::kForward, unit, shape.forward, shape.share_before);
    for (int child : children_[unit]) FSDP_RETURN_IF_ERROR(Forward(child));
    clock_.Compute(SpanKind::kForward, unit, shape.forward,
                   1 - shape.share_before);
    Event after{EventKind::kPostForward, unit};
    after.expects_backward = true;
    return Report(after);
  }

  absl::Status Backward(int unit, bool synchronizes) {
    const UnitShape& shape = model_.units[unit];
    FSDP_RETURN_IF_ERROR(Report({EventKind::kPreBackward, unit}));
    clock_.Compute(SpanKind::kBackward, unit, shape.backward,
                   1 - shape.share_before);
    const std::vector<int>& children = children_[unit];
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      FSDP_RETURN_IF_ERROR(Backward(*child, synchronizes));
    }
    clock_.Compute(SpanKind::kBackward, unit, shape.backward,
                   shape.share_before);
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

  const ModelShape& model_;
  const ShardedShape& sharded_;
  const StepOptions& options_;
  Schedule schedule_;
  std::vector<std::vector<int>> children_;
  RankClock clock_;
};

}  // namespace

void Spent::Add(const Spent& other) {
  compute += other.compute;
  copies += other.copies;
  optimizer += other.optimizer;
  gather += other.gather;
  reduce += other.reduce;
  exposed_gather += other.exposed_gather;
  exposed_reduce += other.exposed_reduce;
  gathered_bytes += other.gathered_bytes;
  reduced_bytes += other.reduced_bytes;
  replicated_bytes += other.replicated_bytes;
}

absl::StatusOr<StepResult> SimulateStep(const ModelShape& model,
                                        const ShardedShape& sharded,
                                        const CostModel& costs,
                                        const StepOptions& options) {
  FSDP_CHECK(!model.units.empty());
  FSDP_CHECK(sharded.units.size() == model.units.size());
  if (options.memory.backwards_per_step < 1 ||
      options.schedule.max_reduce_buffers < 1 ||
      options.schedule.max_gathered_units < 0 ||
      !(options.memory.optimizer_state >= 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a step with ", options.memory.backwards_per_step, " backwards, ",
        options.schedule.max_reduce_buffers, " reduce buffers, ",
        options.schedule.max_gathered_units, " gathered units and ",
        options.memory.optimizer_state,
        " bytes of optimizer state per byte: backwards and buffers are at "
        "least 1, the others at least 0"));
  }
  Rank rank(model, sharded, costs, options);
  FSDP_RETURN_IF_ERROR(rank.Step());
  FSDP_RETURN_IF_ERROR(rank.Step());
  return rank.Result();
}

}  // namespace fsdp::simulator
