#include "checkpoint/run/run_values.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {
namespace {

// The parameters, each once, with the names that it has besides.
void ReadParameters(const torch::nn::Module& module, ModelValues* values) {
  std::map<const void*, std::string> first_names;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined()) continue;
    const auto [first, is_new] =
        first_names.try_emplace(tensor.unsafeGetTensorImpl(), item.key());
    if (!is_new) {
      values->aliases[item.key()] = first->second;
      continue;
    }
    values->all.push_back(WholeRange(item.key(), tensor));
  }
  values->num_ranges = values->num_parameters = values->all.size();
}

// A wrapped module itself has no values while nothing computes.
absl::Status CheckNotWrapped(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !IsOfShardedModel(tensor)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the parameter ", item.key(),
                     " belongs to a sharded model: pass the model that "
                     "FullyShard() returned"));
  }
  return absl::OkStatus();
}

}  // namespace

comm::Communicator* RanksOf(torch::nn::Module& module,
                            comm::Communicator* otherwise) {
  auto* const sharded = dynamic_cast<ShardedModuleBase*>(&module);
  return sharded == nullptr ? otherwise : &sharded->communicator();
}

absl::StatusOr<RunValues> RunValues::Read(const TrainingRun& run,
                                          absl::string_view what) {
  if (run.model == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the run has no model: set TrainingRun::model"));
  }
  RunValues values;
  if (dynamic_cast<ShardedModuleBase*>(run.model) != nullptr) {
    FSDP_RETURN_IF_ERROR(values.ReadSharded(run, what));
  } else {
    FSDP_RETURN_IF_ERROR(values.ReadPlain(*run.model));
  }
  if (run.average != nullptr) {
    if (run.average->is_in_model()) {
      return absl::FailedPreconditionError(absl::StrCat(
          what,
          ": the model has its average instead of its weights: call it "
          "after WeightAverage::InModel()"));
    }
    values.averages_.emplace();
    for (const TensorRange& leaf : values.model_.parameters()) {
      const at::Tensor average = run.average->Of(leaf.values);
      if (!average.defined()) continue;
      values.averages_->push_back(leaf.With(average));
    }
  }
  if (run.optimizer == nullptr) return values;
  FSDP_ASSIGN_OR_RETURN(
      values.optimizer_,
      ReadOptimizerValues(values.model_.parameters(), *run.optimizer));
  return values;
}

absl::Status RunValues::CheckLoaded() const {
  return sharded_ == nullptr ? absl::OkStatus() : sharded_->CheckLoaded();
}

absl::Status RunValues::CheckRanks(int rank, int world_size) const {
  if (sharded_ == nullptr) return absl::OkStatus();
  const comm::Communicator& ranks = sharded_->communicator();
  if (ranks.world_size() == world_size && ranks.rank() == rank) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the model is sharded over ", ranks.world_size(),
      " ranks, of which this is ", ranks.rank(),
      ", but the checkpointer was opened for ", world_size,
      ", of which this is ", rank, ": open it for the ranks of the model"));
}

std::map<std::string, OptimizerSlots> RunValues::ReleaseStates() {
  return std::exchange(optimizer_->slots, {});
}

c10::Device RunValues::device() const {
  if (sharded_ != nullptr) return sharded_->device();
  return model_.all.empty() ? c10::Device(c10::kCPU)
                            : model_.all.front().values.device();
}

absl::Status RunValues::ReadSharded(const TrainingRun& run,
                                    absl::string_view what) {
  auto& module = dynamic_cast<ShardedModuleBase&>(*run.model);
  sharded_ = &module.sharded_model();
  FSDP_ASSIGN_OR_RETURN(WholeAccess access,
                        WholeAccess::BeginAlone(*sharded_, what));
  access_.emplace(std::move(access));
  model_ = ReadModelValues(*sharded_, *module.children().front());
  return absl::OkStatus();
}

absl::Status RunValues::ReadPlain(const torch::nn::Module& module) {
  FSDP_RETURN_IF_ERROR(CheckNotWrapped(module));
  // Without the module itself, which may be in no shared_ptr.
  for (const auto& item :
       module.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    if (dynamic_cast<const ShardedModuleBase*>(item.value().get()) == nullptr) {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "the module ", item.key(),
        " is sharded, but not the model that it is in: shard the whole model, "
        "or save and load that module by itself"));
  }
  ReadParameters(module, &model_);
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) continue;
    model_.all.push_back(WholeRange(item.key(), item.value()));
  }
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
