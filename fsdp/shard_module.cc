// Turns a module's parameters into shards: FullyShard() without the type.
#include <c10/util/Exception.h>

#include <iostream>

#include "absl/algorithm/container.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/precision_switch.h"
#include "fsdp/model/sequential_adapter.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/sharder.h"
#include "fsdp/setup/unit_plan.h"
#include "fsdp/transparent/op_observer.h"

namespace fsdp {
namespace {

Schedule MakeSchedule(const std::vector<PlannedUnit>& units,
                      const std::vector<RuntimeUnit>& placed,
                      const Options& options) {
  std::vector<ScheduledUnit> scheduled;
  for (size_t i = 0; i < units.size(); ++i) {
    ScheduledUnit& result =
        scheduled.emplace_back(ScheduledUnitOf(units[i], options));
    result.shares_memory = absl::c_any_of(
        placed[i].flats,
        [](const RuntimeFlat& flat) { return flat.shared.defined(); });
    result.rests_elsewhere = absl::c_any_of(
        placed[i].flats,
        [](const RuntimeFlat& flat) { return RestsElsewhere(flat->shard()); });
    // With one copy for all ranks, there are no parts to gather.
    result.keeps_part =
        placed[i].placement.part != nullptr && !result.shares_memory;
    result.replicated = placed[i].placement.replicate != nullptr;
    result.sharded = placed[i].placement.shard->world_size() > 1;
  }
  return Schedule(std::move(scheduled), ScheduleOptionsOf(options));
}

void IntroduceModules(const ShardPlan& plan, ShardedModel& model,
                      bool transparent) {
  std::vector<int> units(plan.tree.modules.size(), ShardedModel::kNoUnit);
  for (size_t i = 0; i < plan.units.size(); ++i) {
    units[plan.units[i].unit.module] = static_cast<int>(i);
  }
  model.SetModules(plan.tree.modules, units);
  for (const std::shared_ptr<torch::nn::Module>& module : plan.tree.modules) {
    if (auto* sequential = module->as<torch::nn::SequentialImpl>()) {
      AdaptSequential(*sequential, transparent ? AdaptedUnits::kRecomputed
                                               : AdaptedUnits::kAll);
    }
  }
}

ShardedModel::Settings SettingsOf(
    const ShardPlan& plan, const std::shared_ptr<torch::nn::Module>& root,
    const Options& options, std::shared_ptr<OffloadSpace> offload) {
  ShardedModel::Settings settings;
  settings.commits_steps = offload != nullptr && offload->keeps();
  settings.offload = std::move(offload);
  settings.abort_on_failure = options.abort_on_failure;
  settings.check_order = options.checks.order;
  settings.recompute_options = options.recompute.options;
  settings.ignores_parameters =
      options.ignore.module != nullptr || options.ignore.parameter != nullptr;
  for (const PlannedUnit& planned : plan.units) {
    settings.strategies.push_back(planned.options.strategy);
    settings.precisions.push_back(planned.options.precision);
    settings.recomputed.push_back(planned.recomputed);
    for (const OwnedParameter& owned : planned.unit.parameters) {
      for (const std::string& name : owned.names) {
        if (name != owned.names.front()) {
          settings.aliases[name] = owned.names.front();
        }
      }
    }
  }
  settings.is_training = [weak = std::weak_ptr<torch::nn::Module>(root)] {
    const std::shared_ptr<torch::nn::Module> module = weak.lock();
    return module == nullptr || module->is_training();
  };
  settings.buffers = plan.buffers;
  settings.loaded_later = plan.loaded_later;
  return settings;
}

// Warns of choices that are seldom meant and would show late.
void WarnOfPlan(const ShardPlan& plan, const Options& options) {
  if (options.wrap_policy && plan.units.size() == 1) {
    TORCH_WARN(
        "fsdp: Options::wrap_policy has chosen no module: the whole model is "
        "one unit, which is in memory as a whole while it computes");
  }
  for (const PlannedUnit& planned : plan.units) {
    for (const OwnedParameter& owned : planned.unit.parameters) {
      const at::Tensor& tensor = plan.tree.parameters[owned.parameter].front();
      if (!tensor.requires_grad() || !tensor.is_floating_point() ||
          tensor.element_size() >= 4) {
        continue;
      }
      TORCH_WARN("fsdp: ", owned.names.front(), " is trained in ",
                 c10::toString(tensor.scalar_type()),
                 ", in which small updates vanish: the model may not learn. "
                 "Leave the module in float32 and let MixedPrecision compute "
                 "in less (fsdp::ComputeIn()), or freeze what is not trained");
      return;
    }
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options) {
  comm::Communicator& world = *mesh.world();
  // A timeout that will be refused would be too short to tell the other ranks.
  const absl::Duration timeout = options.timeout > absl::ZeroDuration()
                                     ? *options.timeout
                                     : world.default_timeout();
  // The user's policy may throw.
  absl::StatusOr<ShardPlan> plan = absl::UnknownError("no plan");
  const absl::Status thrown =
      TorchToStatus("planning how to shard the model",
                    [&] { plan = PlanSharding(root, mesh, options); });
  if (!thrown.ok()) plan = thrown;
  FSDP_RETURN_IF_ERROR(comm::Agree(world, plan.status(), "sharding the model",
                                   absl::Now() + timeout));
  FSDP_RETURN_IF_ERROR(comm::CheckSame(world, Fingerprint(*plan, options),
                                       "the models to shard",
                                       absl::Now() + timeout));
  if (world.rank() == 0) WarnOfPlan(*plan, options);
  FSDP_ASSIGN_OR_RETURN(ShardedUnits sharded,
                        ShardUnits(*plan, *root, mesh, options, timeout));
  Schedule schedule = MakeSchedule(plan->units, sharded.units, options);
  auto runtime =
      std::make_unique<Runtime>(mesh.world(), std::move(sharded.units), timeout,
                                std::move(sharded.fences));
  auto model = std::make_shared<ShardedModel>(
      std::move(runtime), std::move(schedule),
      SettingsOf(*plan, root, options, std::move(sharded.offload)));
  IntroduceModules(*plan, *model, options.transparent);
  model->SetObserver(options.transparent ? MakeTransparentUnits(model.get())
                                         : MakeWriteWatch(model.get()));
  if (options.verbose && world.rank() == 0) std::cerr << Describe(*model);
  return model;
}

absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root,
    std::shared_ptr<comm::Communicator> ranks, const Options& options) {
  FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh,
                        comm::Mesh::Create(std::move(ranks), {{"shard", -1}}));
  return ShardModule(root, mesh, options);
}

}  // namespace fsdp
