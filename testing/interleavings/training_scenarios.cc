// Scenarios of training in common memory, as the Schedule says.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "comm/communicator.h"
#include "comm/shared_memory/shared_group.h"
#include "comm/shared_memory/shared_operation.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "testing/interleavings/ranks.h"
#include "testing/interleavings/scenarios.h"

namespace fsdp::interleavings {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::SharedGroup;

constexpr int kUnits = 2;

std::vector<ScheduledUnit> SharingUnits() {
  std::vector<ScheduledUnit> units = fsdp::testing::Layers(kUnits - 1);
  for (ScheduledUnit& unit : units) unit.shares_memory = true;
  return units;
}

// Is one rank's model: its runtime and its user.
class Trainer {
 public:
  Trainer(Rank& rank, const Training& training)
      : rank_(rank),
        training_(training),
        schedule_(SharingUnits(), fsdp::testing::NoPrefetch()),
        shards_(reinterpret_cast<float*>(rank.data)) {}

  void Train() {
    for (int step = 0; step < training_.steps; ++step) {
      if (training_.evaluates) {
        Report(fsdp::testing::EventOf("NoGrad PreForward(0)"));
        Report(fsdp::testing::EventOf("NoGrad PreForward(1)"));
        Report(fsdp::testing::EventOf("NoGrad PostForward(1)"));
        Report(fsdp::testing::EventOf("NoGrad PostForward(0)"));
      } else {
        for (const Event& event : fsdp::testing::Forward(1)) Report(event);
        for (const Event& event : fsdp::testing::Backward(1)) Report(event);
      }
      if (training_.user_unshards) {
        Report(fsdp::testing::EventOf("Unshard(1)"));
        Report(fsdp::testing::EventOf("WaitUnshard(1)"));
      }
      StepOptimizer();
    }
  }

 private:
  using Operation = std::shared_ptr<SharedGroup::Operation>;

  void Report(const Event& event) {
    const absl::StatusOr<Actions> actions = schedule_.Next(event);
    ExpectOk(actions.status(), rank_, "asking the schedule");
    for (const Action& action : *actions) Do(action);
    if (event.kind == EventKind::kPreForward ||
        event.kind == EventKind::kPreBackward ||
        event.kind == EventKind::kPostBackward) {
      Compute(event.unit, *actions);
    }
  }

  void Do(const Action& action) {
    switch (action.kind) {
      case ActionKind::kOpenShards:
        if (std::exchange(are_open_, false)) return;
        return PassFence();
      case ActionKind::kCloseShards:
        return PassFence();
      case ActionKind::kGatherCopy:
        return GatherForUser(action.unit);
      case ActionKind::kWaitGather:
        return Finish(gathers_, action.unit, /*inputs_free=*/true);
      case ActionKind::kReduce:
        return Reduce(action.unit);
      case ActionKind::kWaitReduce:
        if (training_.leaves_out_reductions) return;
        return Finish(reductions_, action.unit, /*inputs_free=*/false);
      default:
        // Shards that lie side by side are gathered; nothing else moves.
        return;
    }
  }

  void PassFence() {
    if (num_fences_++ == training_.left_out_fence) return;
    ExpectOk(rank_.PassFence(), rank_, "at a fence");
  }

  void GatherForUser(int unit) {
    if (training_.unsharding_opens) {
      PassFence();
      are_open_ = true;
      return;
    }
    const at::Tensor own = at::empty({1}, at::kFloat);
    own.mutable_data_ptr<float>()[0] = ShardOf(unit, rank_.rank);
    Start(gathers_, unit, {Collective::kAllGather, Floats(), own});
  }

  void Reduce(int unit) {
    const at::Tensor gradients = Floats();
    for (int i = 0; i < rank_.world_size(); ++i) {
      gradients.mutable_data_ptr<float>()[i] = 1;
    }
    Start(reductions_, unit,
          {Collective::kReduceScatter, at::empty({1}, at::kFloat), gradients});
  }

  void Start(std::map<int, Operation>& operations, int unit,
             const comm::CollectiveArgs& buffers) {
    absl::StatusOr<Operation> operation = rank_.group->Start(
        {buffers.collective, "unit", "float32", buffers.in.numel(), ""},
        buffers, rank_.deadline);
    ExpectOk(operation.status(), rank_, "starting");
    if (operation.ok()) operations[unit] = *std::move(operation);
  }

  void Finish(std::map<int, Operation>& operations, int unit,
              bool inputs_free) {
    const auto found = operations.find(unit);
    if (found == operations.end()) return;
    ExpectOk(rank_.group->Wait(*found->second, inputs_free, rank_.deadline),
             rank_, "finishing");
    operations.erase(found);
  }

  // Reads all of a unit, which has the values that all optimizers left, before
  // it is freed; a unit that `actions` free is not read, since its backward is
  // over.
  void Compute(int unit, const Actions& actions) {
    for (const Action& action : actions) {
      if (action.kind == ActionKind::kFree && action.unit == unit) return;
    }
    for (int peer = 0; peer < rank_.world_size(); ++peer) {
      const float value = ShardOf(unit, peer);
      if (value == static_cast<float>(version_)) continue;
      Violate(absl::StrCat("rank ", rank_.rank, " computes step ", version_,
                           " with a shard of rank ", peer, " of step ", value));
    }
  }

  void StepOptimizer() {
    ++version_;
    for (int unit = 0; unit < kUnits; ++unit) {
      ShardOf(unit, rank_.rank) = static_cast<float>(version_);
    }
  }

  float& ShardOf(int unit, int rank) {
    return shards_[unit * rank_.world_size() + rank];
  }
  at::Tensor Floats() const {
    return at::empty({rank_.world_size()}, at::kFloat);
  }

  Rank& rank_;
  const Training& training_;
  Schedule schedule_;
  float* const shards_;
  int version_ = 0;
  int num_fences_ = 0;
  bool are_open_ = false;
  std::map<int, Operation> gathers_;
  std::map<int, Operation> reductions_;
};

}  // namespace

MakeScenario TrainingSteps(Training training) {
  return OnAllRanks({training.ranks}, [training](Rank& rank) {
    Trainer(rank, training).Train();
  });
}

}  // namespace fsdp::interleavings
