#include "fsdp/fully_sharded_data_parallel.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/describe/describe.h"
#include "fsdp/model/order_check.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/state/module_archive.h"

namespace fsdp {

NoSyncScope::NoSyncScope(std::shared_ptr<ShardedModel> model)
    : model_(std::move(model)), before_(model_->synchronizes()) {
  model_->SetSynchronizes(false);
}

NoSyncScope::~NoSyncScope() {
  if (model_ != nullptr) model_->SetSynchronizes(before_);
}

const std::vector<TensorRange>& ShardedModuleBase::Ranges() const {
  return model_->Ranges();
}

std::vector<at::Tensor> ShardedModuleBase::Parameters() const {
  std::vector<at::Tensor> parameters;
  parameters.reserve(Ranges().size());
  for (const TensorRange& named : Ranges()) {
    parameters.push_back(named.values);
  }
  return parameters;
}

absl::Status ShardedModuleBase::Backward(const at::Tensor& loss,
                                         bool retain_graph) {
  return model_->Backward(loss, retain_graph);
}

absl::Status ShardedModuleBase::StepInBackward(
    std::function<absl::Status(absl::Span<const TensorRange>)> step) {
  return model_->StepInBackward(std::move(step));
}

absl::Status ShardedModuleBase::SetReductionHooks(
    ReduceScatterHook reduce_scatter, AllReduceHook all_reduce) {
  return model_->SetReductionHooks(std::move(reduce_scatter),
                                   std::move(all_reduce));
}

absl::Status ShardedModuleBase::SetGradientDivideFactors(double before,
                                                         double after) {
  return model_->SetGradientDivideFactors(before, after);
}

absl::Status ShardedModuleBase::SetTrainable(absl::string_view name,
                                             bool trainable) {
  return model_->SetTrainable(name, trainable);
}

MemoryStats ShardedModuleBase::memory_stats() const {
  return model_->memory_stats();
}

MemoryPlan ShardedModuleBase::PlanMemory(
    const MemoryPlanOptions& options) const {
  return fsdp::PlanMemory(*model_, options);
}

std::string ShardedModuleBase::Describe() const {
  return fsdp::Describe(*model_);
}

std::optional<OffloadStats> ShardedModuleBase::offload_stats() const {
  const OffloadSpace* const space = model_->offload();
  if (space == nullptr) return std::nullopt;
  return space->stats();
}

comm::Communicator& ShardedModuleBase::communicator() const {
  return model_->communicator();
}

// NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
void ShardedModuleBase::zero_grad(bool set_to_none) {
  ParameterOwner& owner = model_->parameter_owner();
  owner.OpenGradients();
  torch::nn::Module::zero_grad(set_to_none);  // ignored parameters
  owner.CloseGradients();
  model_->ZeroGrad(set_to_none);
}

absl::StatusOr<at::Tensor> ShardedModuleBase::ClipGradNorm(double max_norm,
                                                           double norm_type) {
  ClipGradNormOptions options;
  options.max_norm = max_norm;
  options.norm_type = norm_type;
  options.timeout = model_->timeout();
  return fsdp::ClipGradNorm(communicator(), Ranges(), options);
}

absl::Status ShardedModuleBase::Save(const std::string& path) const {
  StateDictOptions options;
  options.rank0_only = true;
  options.offload_to_cpu = true;
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, GatherStateDict(options));
  absl::Status written;
  if (communicator().rank() == 0) {
    written = WriteArchiveFile(wrapped(), dict, path);
  }
  return comm::Agree(communicator(), written, "Save()",
                     absl::Now() + model_->timeout());
}

void ShardedModuleBase::save(torch::serialize::OutputArchive& archive) const {
  WriteArchive(wrapped(), ValueOrThrow(GatherStateDict()), /*prefix=*/"",
               archive);
}

void ShardedModuleBase::load(torch::serialize::InputArchive& archive) {
  StateDict dict;
  ReadArchive(wrapped(), /*prefix=*/"", archive, dict);
  ThrowIfError(LoadStateDict(dict));
}

}  // namespace fsdp
