#include "fsdp/optimizer_check.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/resting/resting_states.h"

namespace fsdp {
namespace {

// Names by tensor object.
using Names = std::map<const void*, std::string>;

Names NamesOfShards(const ShardedModuleBase& model) {
  Names names;
  for (const NamedShard& named : model.NamedShards()) {
    names[named.shard.unsafeGetTensorImpl()] = named.name;
  }
  return names;
}

Names NamesOfModulesOwn(const ShardedModuleBase& model) {
  Names names;
  for (const auto& item : model.named_parameters()) {
    // Without the wrapper.
    names[item.value().unsafeGetTensorImpl()] =
        std::string(absl::StripPrefix(item.key(), "module."));
  }
  return names;
}

// `place`: "parameter 3 of group 0".
absl::Status CheckNoShard(const at::Tensor& tensor, const Names& own,
                          const std::string& place, bool allow_others) {
  const auto found = own.find(tensor.unsafeGetTensorImpl());
  if (tensor.has_storage() && flat_param::IsGuarded(tensor.storage())) {
    return absl::FailedPreconditionError(absl::StrCat(
        place, " of the optimizer is ",
        found == own.end() ? "a sharded module's own parameter"
                           : absl::StrCat("the module's own ", found->second),
        ", which has values only while its unit computes: the optimizer would "
        "go on without training it. Make the optimizer after sharding, from "
        "Parameters() or NamedShards()"));
  }
  // What sharding was told to ignore is the module's own for good.
  if (found != own.end() || allow_others) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      place,
      " of the optimizer is no shard of this model: copies of shards are not "
      "trained. Use the tensors of Parameters() or NamedShards() themselves, "
      "or set OptimizerCheckOptions::allow_others if it belongs to another "
      "model"));
}

absl::Status CheckMissing(const ShardedModuleBase& model, const Names& seen,
                          OptimizerCheckOptions::Missing missing) {
  std::vector<std::string> names;
  for (const NamedShard& named : model.NamedShards()) {
    if (!named.shard.requires_grad()) continue;
    if (seen.count(named.shard.unsafeGetTensorImpl()) > 0) continue;
    names.push_back(named.name);
  }
  if (names.empty() || missing == OptimizerCheckOptions::Missing::kAccept) {
    return absl::OkStatus();
  }
  const std::string text =
      absl::StrCat(names.size(),
                   " trainable parameters are in no group of the optimizer "
                   "and would never change: ",
                   absl::StrJoin(names, ", "));
  if (missing == OptimizerCheckOptions::Missing::kWarn) {
    TORCH_WARN("fsdp: ", text);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      text,
      ". Add them, freeze them by SetTrainable(), or choose another "
      "OptimizerCheckOptions::missing"));
}

// Other optimizers do not bring in what rests elsewhere, and keep their states
// in memory.
absl::Status CheckOffload(const ShardedModuleBase& model,
                          const torch::optim::Optimizer& optimizer) {
  const OffloadSpace* const space = model.sharded_model().offload();
  const bool knows = dynamic_cast<const RestingStates*>(&optimizer) != nullptr;
  if (knows || space == nullptr || !space->plan().leaves_device()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "Options::offload lets parameters, gradients or optimizer states rest "
      "elsewhere, which this optimizer knows nothing of: use ",
      kFusedOptimizers));
}

}  // namespace

absl::Status CheckOptimizer(const ShardedModuleBase& model,
                            const torch::optim::Optimizer& optimizer,
                            const OptimizerCheckOptions& options) {
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    return absl::InvalidArgumentError(
        "the optimizer is LBFGS, which computes over all elements of all "
        "parameters, and a rank has a part of them: use an element-wise one");
  }
  FSDP_RETURN_IF_ERROR(CheckOffload(model, optimizer));
  FSDP_RETURN_IF_ERROR(model.sharded_model().CheckBinding());
  const Names shards = NamesOfShards(model);
  const Names own = NamesOfModulesOwn(model);
  Names seen;  // places of shards
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& tensors = optimizer.param_groups()[g].params();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const std::string place = absl::StrCat("parameter ", i, " of group ", g);
      const auto shard = shards.find(tensors[i].unsafeGetTensorImpl());
      if (shard == shards.end()) {
        FSDP_RETURN_IF_ERROR(
            CheckNoShard(tensors[i], own, place, options.allow_others));
        continue;
      }
      const auto [first, is_new] = seen.emplace(shard->first, place);
      if (is_new) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "the shard of ", shard->second, " is in the optimizer twice, as ",
          first->second, " and as ", place, ": it would be stepped twice"));
    }
  }
  return CheckMissing(model, seen, options.missing);
}

}  // namespace fsdp
