#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/lbfgs.h>

#include <map>
#include <string>
#include <typeinfo>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/guarded_storage.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/resting/resting_places.h"

namespace fsdp {
namespace {

// Maps tensor objects to names.
using Names = std::map<const void*, std::string>;

// `place` is, for example, "parameter 3 of group 0".
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
        "Parameters() or Ranges()"));
  }
  // An ignored parameter stays the module's own.
  if (found != own.end() || allow_others) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      place,
      " of the optimizer is no shard of this model: copies of shards are not "
      "trained. Use the tensors of Parameters() or Ranges() themselves, "
      "or set OptimizerCheckOptions::allow_others if it belongs to another "
      "model"));
}

absl::Status CheckMissing(const ShardedModuleBase& model, const Names& seen,
                          OptimizerCheckOptions::Missing missing) {
  std::vector<std::string> names;
  for (const TensorRange& named : model.Ranges()) {
    if (!named.values.requires_grad()) continue;
    if (seen.count(named.values.unsafeGetTensorImpl()) > 0) continue;
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

// Refuses other optimizers: they do not bring in what rests elsewhere, and keep
// their states in memory.
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

class OptimizerProbe {
 public:
  explicit OptimizerProbe(torch::optim::Optimizer& optimizer)
      : optimizer_(optimizer),
        groups_(std::move(optimizer.param_groups())),
        states_(std::move(optimizer.state())) {
    for (const torch::optim::OptimizerParamGroup& group : groups_) {
      for (const at::Tensor& tensor : group.params()) {
        gradients_.emplace_back(tensor,
                                std::exchange(tensor.mutable_grad(), {}));
      }
    }
  }
  ~OptimizerProbe() {
    optimizer_.param_groups() = std::move(groups_);
    optimizer_.state() = std::move(states_);
    for (auto& [tensor, gradient] : gradients_) {
      tensor.mutable_grad() = std::move(gradient);
    }
  }

  // Returns what is wrong; empty if nothing is, or if it cannot be found out.
  std::string Run() {
    const c10::NoGradGuard no_grad;
    // Each part of this matrix has another norm.
    const at::Tensor whole =
        at::arange(1, 25, at::kDouble).pow(2).div(10).view({4, 6});
    const std::vector<at::Tensor> pieces = whole.flatten().split({5, 9, 10});
    const at::Tensor& piece = pieces[0];
    std::vector<at::Tensor> all, alone, again;
    if (!Step({whole}, all).ok()) return "";  // it needs something else
    const absl::Status cut =
        Step({whole, whole, piece, pieces[1], pieces[2]}, all);
    if (!cut.ok()) {
      return absl::StrCat("fails on a piece of a parameter: ", cut.message());
    }
    const bool can_be_alone = Step({piece}, alone).ok() &&
                              Step({piece}, again).ok() &&
                              IsSame(at::cat(alone), at::cat(again));
    for (size_t group = 0; group < groups_.size(); ++group) {
      const at::Tensor* const made = &all[5 * group];
      if (!IsSame(made[0], made[1])) return "";  // draws random numbers
      if (!IsSame(made[0], at::cat({made[2], made[3], made[4]}))) {
        return "steps pieces of a parameter otherwise than the whole";
      }
      if (can_be_alone && !IsSame(alone[group], made[2])) {
        return "steps a parameter otherwise where there are others";
      }
    }
    return "";
  }

 private:
  // The tolerance exceeds the rounding of an optimizer that computes in
  // float32.
  static bool IsSame(const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor difference = (a.flatten() - b.flatten()).abs().max();
    return (difference <= 1e-3 * a.abs().max()).item<bool>();
  }

  // Sets `changes` to what three steps change in copies of `values`, by group.
  absl::Status Step(const std::vector<at::Tensor>& values,
                    std::vector<at::Tensor>& changes) {
    optimizer_.state().clear();
    optimizer_.param_groups().clear();
    std::vector<at::Tensor> made;
    for (const torch::optim::OptimizerParamGroup& group : groups_) {
      std::vector<at::Tensor> leaves;
      for (const at::Tensor& value : values) {
        leaves.push_back(value.clone().set_requires_grad(true));
      }
      made.insert(made.end(), leaves.begin(), leaves.end());
      torch::optim::OptimizerParamGroup probed(std::move(leaves));
      if (group.has_options()) {
        probed.set_options(group.options().clone());
        // A rate that begins at 0 would change nothing.
        TorchToStatus("a rate", [&] {
          probed.options().set_lr(0.1);
        }).IgnoreError();
      }
      optimizer_.param_groups().push_back(std::move(probed));
    }
    absl::Status stepped = TorchToStatus("a step", [&] {
      for (int step = 1; step <= 3; ++step) {
        for (size_t i = 0; i < made.size(); ++i) {
          // The gradient depends on the value alone, wherever the element is.
          made[i].mutable_grad() = (values[i % values.size()] * step).sin();
        }
        optimizer_.step();
      }
    });
    changes.clear();
    for (size_t i = 0; i < made.size(); ++i) {
      changes.push_back(made[i].detach() - values[i % values.size()]);
    }
    return stepped;
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<torch::optim::OptimizerParamGroup> groups_;
  std::decay_t<decltype(optimizer_.state())> states_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

}  // namespace

void ProbeOptimizer(torch::optim::Optimizer& optimizer) {
  // This library's own optimizers are element-wise.
  if (dynamic_cast<RestingStates*>(&optimizer) != nullptr) return;
  const std::string finding = OptimizerProbe(optimizer).Run();
  if (finding.empty()) return;
  throw StatusError(absl::InvalidArgumentError(absl::StrCat(
      "the optimizer ", c10::demangle(typeid(optimizer).name()), " ", finding,
      ", and a rank has pieces of a part of the parameters: results would "
      "depend on the number of ranks. Use an element-wise one")));
}

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
  Names shards;
  for (const TensorRange& named : model.Ranges()) {
    shards[named.values.unsafeGetTensorImpl()] = named.name;
  }
  Names own;  // the module's, without the wrapper's prefix
  for (const auto& item : model.named_parameters()) {
    own[item.value().unsafeGetTensorImpl()] =
        std::string(absl::StripPrefix(item.key(), "module."));
  }
  Names seen;  // shards with their places
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
  FSDP_RETURN_IF_ERROR(CheckMissing(model, seen, options.missing));
  return TorchToStatus("probing the optimizer", [&] {
    // The probe leaves the optimizer as it was.
    ProbeOptimizer(const_cast<torch::optim::Optimizer&>(optimizer));
  });
}

}  // namespace fsdp
