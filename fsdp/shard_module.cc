#include "fsdp/shard_module.h"

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/module_tree.h"
#include "fsdp/runtime.h"
#include "fsdp/schedule.h"
#include "fsdp/sequential_adapter.h"
#include "fsdp/unit_handle.h"
#include "fsdp/unit_plan.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::NamedParameter;

// A module holds a parameter in its dictionary and in a member.
constexpr int kReferencesPerUse = 2;

struct Plan {
  ModuleTree tree;
  std::vector<Unit> units;  // those that own something, and the root
};

// Only as long as nothing but modules refers to a parameter is its count what
// its registrations explain. An optimizer refers to every trainable one.
absl::Status CheckOutsideReferences(const ModuleTree& tree) {
  std::map<const void*, int> uses;
  for (const ParameterUse& use : tree.uses) {
    for (const at::Tensor& tensor : tree.parameters[use.parameter]) {
      ++uses[tensor.unsafeGetTensorImpl()];
    }
  }
  bool any = false;
  for (const std::vector<at::Tensor>& tensors : tree.parameters) {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.requires_grad()) continue;
      any = true;
      // One reference is the tree's own.
      const int explained =
          1 + kReferencesPerUse * uses[tensor.unsafeGetTensorImpl()];
      if (static_cast<int>(tensor.use_count()) <= explained) {
        return absl::OkStatus();
      }
    }
  }
  if (!any) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "something besides the module refers to every trainable parameter. If it "
      "is an optimizer, it would go on without training anything: make it "
      "after sharding, from Parameters(). If it is a list or a loss of yours, "
      "drop it first or set Options::allow_outside_references");
}

absl::Status CheckOneDevicePerUnit(const Plan& plan) {
  for (const Unit& unit : plan.units) {
    const at::Tensor* first = nullptr;
    for (const OwnedParameter& owned : unit.parameters) {
      const at::Tensor& tensor = plan.tree.parameters[owned.parameter].front();
      if (first == nullptr) first = &tensor;
      if (tensor.device() == first->device()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", owned.names.front(), " of unit ", DisplayName(unit),
          " is on ", tensor.device().str(), ", another is on ",
          first->device().str(), ": a unit lives on one device"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Plan> MakePlan(const std::shared_ptr<torch::nn::Module>& root,
                              const Options& options) {
  if (c10::InferenceMode::is_enabled()) {
    return absl::FailedPreconditionError(
        "a model cannot be sharded in inference mode, whose tensors have no "
        "versions: leave it first. Sharded models run in it");
  }
  FSDP_RETURN_IF_ERROR(flat_param::CheckGuardedStorage());
  Plan plan;
  FSDP_ASSIGN_OR_RETURN(plan.tree, ReadModuleTree(root, options.wrap_policy));
  FSDP_ASSIGN_OR_RETURN(UnitPlan units,
                        PlanUnits(plan.tree.nodes, plan.tree.uses));
  // Units that own nothing have nothing to gather; those inside them belong to
  // the next one outside.
  std::vector<int> kept(units.units.size(), -1);
  for (size_t i = 0; i < units.units.size(); ++i) {
    Unit& unit = units.units[i];
    const int parent = unit.parent == -1 ? -1 : kept[unit.parent];
    if (i > 0 && unit.parameters.empty()) {
      kept[i] = parent;
      continue;
    }
    unit.parent = parent;
    kept[i] = static_cast<int>(plan.units.size());
    plan.units.push_back(std::move(unit));
  }
  if (!options.allow_outside_references) {
    FSDP_RETURN_IF_ERROR(CheckOutsideReferences(plan.tree));
  }
  FSDP_RETURN_IF_ERROR(CheckOneDevicePerUnit(plan));
  return plan;
}

// Everything ranks have to agree on, one line each, for comparison by text.
std::string Fingerprint(const Plan& plan, const Options& options) {
  std::string text = absl::StrCat(
      "options: reshard ", options.reshard_after_forward, ", root ",
      options.reshard_root_after_forward, ", prefetch forward ",
      options.forward_prefetch, ", backward ", options.backward_prefetch,
      ", broadcast ", options.broadcast_parameters, "\n");
  for (const Unit& unit : plan.units) {
    absl::StrAppend(&text, "unit ", DisplayName(unit), "\n");
    for (const OwnedParameter& owned : unit.parameters) {
      const at::Tensor& tensor = plan.tree.parameters[owned.parameter].front();
      absl::StrAppend(&text, "  ", absl::StrJoin(owned.names, " = "), " ",
                      c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "] strides [",
                      absl::StrJoin(tensor.strides(), ", "), "] ",
                      tensor.device().is_cpu() ? "cpu" : "accelerator",
                      tensor.requires_grad() ? "" : " frozen", "\n");
    }
  }
  return text;
}

std::string FreedText(const Unit& unit) {
  return absl::StrCat(
      "the parameters of unit ", DisplayName(unit),
      " are sharded, and this rank holds only a part of them outside the "
      "unit's forward and backward. If this is a forward, let the parent call "
      "its child by fsdp::Forward(child, ...) instead of child->forward(...). "
      "To read or write values use Parameters(), NamedShards() or "
      "ForEachFullParameter()");
}

class Sharder {
 public:
  Sharder(Plan plan, comm::Communicator& communicator, const Options& options,
          absl::Duration timeout)
      : plan_(std::move(plan)),
        communicator_(communicator),
        options_(options),
        timeout_(timeout) {}

  absl::StatusOr<RuntimeUnit> Shard(const Unit& unit) {
    RuntimeUnit result{DisplayName(unit), {}};
    std::map<at::ScalarType, std::vector<NamedParameter>> by_dtype;
    for (const OwnedParameter& owned : unit.parameters) {
      std::vector<at::Tensor>& tensors = plan_.tree.parameters[owned.parameter];
      by_dtype[tensors.front().scalar_type()].push_back(
          {owned.names.front(), std::move(tensors)});
    }
    for (auto& [dtype, parameters] : by_dtype) {
      FSDP_ASSIGN_OR_RETURN(
          result.flats.emplace_back(),
          MakeFlat(result.name, FreedText(unit), std::move(parameters)));
    }
    return result;
  }

  const Plan& plan() const { return plan_; }

 private:
  absl::StatusOr<std::unique_ptr<FlatParameter>> MakeFlat(
      const std::string& unit_name, std::string freed_text,
      std::vector<NamedParameter> parameters) {
    FSDP_ASSIGN_OR_RETURN(
        flat_param::FlatLayout layout,
        flat_param::LayoutOf(parameters, communicator_.world_size()));
    at::Tensor flat;
    FSDP_RETURN_IF_ERROR(TorchToStatus(
        absl::StrCat("flattening unit ", unit_name),
        [&] { flat = FlatParameter::Flatten(parameters, layout); }));
    if (options_.broadcast_parameters) {
      FSDP_ASSIGN_OR_RETURN(
          std::unique_ptr<comm::Work> work,
          communicator_.Broadcast(flat, /*root=*/0, unit_name));
      FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + timeout_));
    }
    std::unique_ptr<FlatParameter> result;
    FSDP_RETURN_IF_ERROR(
        TorchToStatus(absl::StrCat("sharding unit ", unit_name), [&] {
          result = std::make_unique<FlatParameter>(
              std::move(parameters), std::move(layout), flat,
              communicator_.rank(), std::move(freed_text));
        }));
    return result;
  }

  Plan plan_;
  comm::Communicator& communicator_;
  const Options& options_;
  const absl::Duration timeout_;
};

Schedule MakeSchedule(const std::vector<Unit>& units, const Options& options) {
  std::vector<ScheduledUnit> scheduled;
  for (size_t i = 0; i < units.size(); ++i) {
    scheduled.push_back({DisplayName(units[i]), units[i].parent,
                         i == 0 ? options.reshard_root_after_forward
                                : options.reshard_after_forward});
  }
  ScheduleOptions schedule_options;
  schedule_options.forward_prefetch = options.forward_prefetch;
  schedule_options.backward_prefetch = options.backward_prefetch;
  return Schedule(std::move(scheduled), schedule_options);
}

void AttachHandles(const Plan& plan,
                   const std::shared_ptr<ShardedModel>& model) {
  for (size_t i = 0; i < plan.units.size(); ++i) {
    plan.tree.modules[plan.units[i].module]->register_module(
        kUnitHandleName,
        std::make_shared<UnitHandle>(model, static_cast<int>(i)));
  }
  for (const std::shared_ptr<torch::nn::Module>& module : plan.tree.modules) {
    if (auto* sequential = module->as<torch::nn::SequentialImpl>()) {
      AdaptSequential(*sequential);
    }
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShardedModel>> ShardModule(
    const std::shared_ptr<torch::nn::Module>& root,
    std::shared_ptr<comm::Communicator> communicator, const Options& options) {
  const absl::Duration timeout = options.timeout == absl::ZeroDuration()
                                     ? communicator->default_timeout()
                                     : options.timeout;
  absl::StatusOr<Plan> plan = MakePlan(root, options);
  FSDP_RETURN_IF_ERROR(comm::Agree(*communicator, plan.status(),
                                   "sharding the model",
                                   absl::Now() + timeout));
  FSDP_RETURN_IF_ERROR(
      comm::CheckSame(*communicator, Fingerprint(*plan, options),
                      "the models to shard", absl::Now() + timeout));
  Sharder sharder(*std::move(plan), *communicator, options, timeout);
  std::vector<RuntimeUnit> units;
  for (const Unit& unit : sharder.plan().units) {
    absl::StatusOr<RuntimeUnit> sharded = sharder.Shard(unit);
    if (!sharded.ok()) {
      communicator->Abort(sharded.status());
      return sharded.status();
    }
    units.push_back(*std::move(sharded));
  }
  auto model = std::make_shared<ShardedModel>(
      std::make_unique<Runtime>(std::move(communicator), std::move(units),
                                timeout),
      MakeSchedule(sharder.plan().units, options),
      ShardedModel::Settings{options.abort_on_failure});
  AttachHandles(sharder.plan(), model);
  return model;
}

}  // namespace fsdp
