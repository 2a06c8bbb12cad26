#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/state/whole_model.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_model.h"
#include "fsdp/testing/program/program_optimizers.h"
#include "fsdp/testing/program/sharded_run.h"

namespace fsdp::testing {

// Returns the root and, if they are units, the program's units and their
// children.
std::vector<torch::nn::Module*> ShardedRun::UnitModules() const {
  std::vector<torch::nn::Module*> modules;
  if (!p_.bare) modules.push_back(model_.module().get());
  // With wrapped layers, a program's unit may own nothing and be no unit.
  if (p_.no_wrap || p_.wrap_linear) return modules;
  for (const auto& unit : model_.module()->units()) {
    modules.push_back(unit.get());
    if (unit->child() != nullptr) modules.push_back(unit->child().get());
  }
  return modules;
}

absl::Status ShardedRun::Look() {
  for (torch::nn::Module* module : UnitModules()) {
    MaybeDelay();
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(*module));
    if (p_.salt % 2 == 0) FSDP_RETURN_IF_ERROR(handle.Wait());
    FSDP_RETURN_IF_ERROR(Reshard(*module));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::UnshardAll() {
  for (torch::nn::Module* module : UnitModules()) {
    FSDP_ASSIGN_OR_RETURN(UnshardHandle handle, Unshard(*module));
    MaybeDelay();
    if (p_.salt % 2 == 0) FSDP_RETURN_IF_ERROR(handle.Wait());
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::Rebuild() {
  FSDP_RETURN_IF_ERROR(model_->RebuildFullParams().status());
  for (torch::nn::Module* module : UnitModules()) {
    FSDP_RETURN_IF_ERROR(Reshard(*module));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::CompareOutput(const at::Tensor& output) {
  const size_t index = next_output_++;
  return Differ(absl::StrCat("output ", index, " of an evaluation"), output,
                record_.outputs[index][world_.rank()]);
}

absl::Status ShardedRun::Eval(int step) {
  const torch::NoGradGuard no_grad;
  MaybeDelay();
  const ProgramPlace place{step, kEvalBatch, world_.rank()};
  model_.module()->set_place(place);
  model_->eval();
  const at::Tensor output = model_->forward(BatchOf(p_, place).clone());
  model_->train();
  return CompareOutput(output);
}

absl::Status ShardedRun::Measure(int step) {
  MaybeDelay();
  const ProgramPlace place{step, kMeasureBatch, world_.rank()};
  model_.module()->set_place(place);
  return CompareOutput(model_->forward(BatchOf(p_, place) * 1));
}

absl::Status ShardedRun::LoseForward(int step) {
  const torch::NoGradGuard no_grad;
  const ProgramPlace place{step, kMeasureBatch, world_.rank()};
  model_.module()->set_place(place);
  model_->forward(BatchOf(p_, place).clone());
  return absl::OkStatus();
}

std::string ShardedRun::SaveModel() {
  torch::serialize::OutputArchive archive;
  model_->save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

absl::Status ShardedRun::SaveAndCompare() {
  std::istringstream in(SaveModel());
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  ProgramModel plain(p_, ModelKind{StoredDtype(p_)});
  plain.load(archive);
  const auto parameters = plain.named_parameters();
  for (const auto& [name, value] : record_.saved[next_saved_++]) {
    FSDP_RETURN_IF_ERROR(Differ(absl::StrCat("what is saved of ", name),
                                parameters[name], value));
  }
  return absl::OkStatus();
}

absl::Status ShardedRun::Summon(bool write) {
  SummonOptions options;
  options.rank0_only = write && p_.salt % 3 == 0;
  FSDP_ASSIGN_OR_RETURN(auto scope, model_->SummonFullParams(options));
  const torch::NoGradGuard no_grad;
  std::set<const void*> seen;
  const bool has_values = !options.rank0_only || world_.rank() == 0;
  for (at::Tensor& parameter : model_.module()->parameters()) {
    if (!write || !has_values || parameter.numel() == 0) continue;
    if (seen.insert(parameter.data_ptr()).second) parameter.mul_(0.95);
  }
  return scope.Close();
}

absl::Status ShardedRun::Visit() {
  VisitOptions options;
  options.writeback = true;
  options.rank0_only = p_.salt % 3 == 0;
  const bool writes = !options.rank0_only || world_.rank() == 0;
  return model_->ForEachFullParameter(
      [writes](const std::string&, const at::Tensor& parameter) {
        const torch::NoGradGuard no_grad;
        if (writes) at::Tensor(parameter).add_(0.01);
        return absl::OkStatus();
      },
      options);
}

absl::Status ShardedRun::LoadOtherValues() {
  FSDP_ASSIGN_OR_RETURN(const StateDict now, model_->GatherStateDict());
  std::set<std::string> buffers;
  for (const auto& item : model_.module()->named_buffers()) {
    buffers.insert(item.key());
  }
  LoadOptions options;
  options.rank0_only = p_.salt % 3 == 0;
  StateDict other;
  for (const auto& item : now) {
    if (options.rank0_only && world_.rank() != 0) break;
    const bool is_buffer = buffers.count(item.key()) > 0;
    other.insert(item.key(),
                 is_buffer ? item.value() + 1 : item.value() * 0.95);
  }
  return model_->LoadStateDict(other, options);
}

absl::Status ShardedRun::TakeSnapshot() {
  if (p_.salt % 3 == 0) {
    FSDP_ASSIGN_OR_RETURN(snapshot_.whole, model_->GatherStateDict());
  } else if (p_.salt % 3 == 1) {
    FSDP_ASSIGN_OR_RETURN(snapshot_.pieces, model_->MakeShardedStateDict());
  } else {
    snapshot_.saved = SaveModel();
  }
  if (HasWholeOptimizerState(p_)) {
    FSDP_ASSIGN_OR_RETURN(snapshot_.optimizer,
                          model_->GatherOptimizerState(*optimizers_.all[0]));
  }
  snapshot_.taken = true;
  return absl::OkStatus();
}

absl::Status ShardedRun::RestoreModel() {
  if (p_.salt % 3 == 0) return model_->LoadStateDict(snapshot_.whole);
  if (p_.salt % 3 == 1) {
    return model_->LoadShardedStateDict(snapshot_.pieces->parameters,
                                        snapshot_.pieces->others);
  }
  std::istringstream in(snapshot_.saved);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  model_->load(archive);
  return absl::OkStatus();
}

absl::Status ShardedRun::Restore() {
  if (!snapshot_.taken) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(RestoreModel());
  if (!HasWholeOptimizerState(p_)) return absl::OkStatus();
  if (!p_.keep && p_.salt % 5 == 0) MakeOptimizersAnew();
  return model_->LoadOptimizerState(*optimizers_.all[0], snapshot_.optimizer);
}

absl::Status ShardedRun::RemakeOptimizer() {
  if (!HasWholeOptimizerState(p_)) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                        model_->GatherOptimizerState(*optimizers_.all[0]));
  MakeOptimizersAnew();
  return model_->LoadOptimizerState(*optimizers_.all[0], states);
}

absl::Status ShardedRun::Toggle(int step) {
  const std::string name = ToggledName(p_, step);
  for (const TensorRange& shard : model_->Ranges()) {
    if (shard.name != name) continue;
    at::Tensor(shard.values).mutable_grad() = at::Tensor();
    return model_->SetTrainable(name, !shard.values.requires_grad());
  }
  return absl::InternalError(absl::StrCat("no shard of ", name));
}

void ShardedRun::WriteShards() {
  const torch::NoGradGuard no_grad;
  MaybeDelay();
  for (const TensorRange& shard : model_->Ranges()) {
    at::Tensor(shard.values).mul_(0.95);
  }
}

absl::Status ShardedRun::Call(int step, int call) {
  switch (call) {
    case kLook:
      return Look();
    case kRebuild:
      return Rebuild();
    case kEval:
      return Eval(step);
    case kInferenceEval: {
      const c10::InferenceMode inference;
      return Eval(step);
    }
    case kMeasure:
      return Measure(step);
    case kLostForward:
      return LoseForward(step);
    case kTakeStateDict:
      return model_->GatherStateDict().status();
    case kSave:
      return SaveAndCompare();
    case kInferenceSummon: {
      const c10::InferenceMode inference;
      return Summon(/*write=*/false);
    }
    case kUnshard:
      return UnshardAll();
    case kSummon:
      return Summon(/*write=*/true);
    case kVisit:
      return Visit();
    case kLoad:
      return LoadOtherValues();
    case kSnapshot:
      return TakeSnapshot();
    case kRestore:
      return Restore();
    case kNewOptimizer:
      return RemakeOptimizer();
    case kToggle:
      return Toggle(step);
    case kWriteShards:
      WriteShards();
      return absl::OkStatus();
    case kRestart:
      optimizers_ = ProgramOptimizers();
      model_ = FullyShardedDataParallel<ProgramModel>(nullptr);
      return Create();
    default:
      return absl::OkStatus();
  }
}

}  // namespace fsdp::testing
