#include "fsdp/fully_sharded_data_parallel.h"

#include <c10/core/GradMode.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_parameters.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/runtime/gradient_buffer.h"

namespace fsdp {
namespace {

// Sets what has a value here, for the units that `module` and, with `recurse`,
// the modules inside it are.
absl::Status SetReduction(torch::nn::Module& module, bool recurse,
                          std::optional<bool> synchronizes,
                          std::optional<bool> all_reduces) {
  bool any = false;
  const auto set_if_unit = [&](const torch::nn::Module& candidate) {
    const std::optional<UnitHandle> unit = FindUnit(candidate);
    if (!unit.has_value()) return absl::OkStatus();
    any = true;
    return unit->model->SetReduction(unit->unit, synchronizes, all_reduces);
  };
  FSDP_RETURN_IF_ERROR(set_if_unit(module));
  if (recurse) {
    for (const auto& inner : module.modules(/*include_self=*/false)) {
      FSDP_RETURN_IF_ERROR(set_if_unit(*inner));
    }
  }
  if (any) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "module ", module.name(), recurse ? " is and has no unit" : " is no unit",
      " of a sharded model, so it has no gradients to reduce: see "
      "Describe() for the units"));
}

using ::fsdp::comm::ReduceOp;
using ::fsdp::comm::Work;

// Values are scaled before they are rounded, so that an fp16 sum does not
// overflow.
double ScaleFor(const comm::Communicator& group, c10::ScalarType dtype) {
  return MeanOver(group.world_size(), dtype).before;
}

at::Tensor Compress(const at::Tensor& values, double scale,
                    c10::ScalarType dtype) {
  return scale == 1 ? values.to(dtype) : values.mul(scale).to(dtype);
}

// Widens the result once it is there, and takes back the scale.
class CompressedWork final : public Work {
 public:
  CompressedWork(std::unique_ptr<Work> work, at::Tensor compressed,
                 double scale, at::Tensor result)
      : work_(std::move(work)),
        compressed_(std::move(compressed)),
        scale_(scale),
        result_(std::move(result)) {}

  absl::Status Wait(absl::Time deadline) override {
    return Finish(work_->Wait(deadline));
  }
  absl::Status BlockCurrentStream() override {
    return Finish(work_->BlockCurrentStream());
  }

 private:
  absl::Status Finish(absl::Status status) {
    if (status.ok() && compressed_.defined()) {
      c10::NoGradGuard no_grad;
      result_.copy_(compressed_);
      if (scale_ != 1) result_.div_(scale_);
      compressed_.reset();
    }
    return status;
  }

  const std::unique_ptr<Work> work_;
  at::Tensor compressed_;
  const double scale_;
  at::Tensor result_;
};

// Writes `dict`, which has the names of `module`, as torch::save() writes the
// unsharded module.
void WriteArchive(const torch::nn::Module& module, const StateDict& dict,
                  const std::string& prefix,
                  torch::serialize::OutputArchive& archive) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    const at::Tensor* value = dict.find(prefix + item.key());
    if (value != nullptr) archive.write(item.key(), *value);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    const at::Tensor* value = dict.find(prefix + item.key());
    if (value != nullptr) {
      archive.write(item.key(), *value, /*is_buffer=*/true);
    }
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    WriteArchive(*child.value(), dict, prefix + child.key() + ".", inner);
    archive.write(child.key(), inner);
  }
}

// The file appears at `path` when it is complete.
absl::Status WriteArchiveFile(const torch::nn::Module& module,
                              const StateDict& dict, const std::string& path) {
  FSDP_ASSIGN_OR_RETURN(PartialFile file, PartialFile::Create(path));
  absl::Status written;
  const absl::Status thrown =
      TorchToStatus(absl::StrCat("writing ", path), [&] {
        torch::serialize::OutputArchive archive;
        WriteArchive(module, dict, /*prefix=*/"", archive);
        archive.save_to([&](const void* bytes, size_t count) {
          written.Update(file.Write(
              absl::string_view(static_cast<const char*>(bytes), count)));
          return written.ok() ? count : 0;
        });
      });
  // What LibTorch throws follows from it.
  FSDP_RETURN_IF_ERROR(written);
  FSDP_RETURN_IF_ERROR(thrown);
  return file.Publish();
}

// Adds the parameters and buffers of `module` that are in `archive` to `dict`.
void ReadArchive(const torch::nn::Module& module, const std::string& prefix,
                 torch::serialize::InputArchive& archive, StateDict& dict) {
  const auto read = [&](const std::string& name, bool is_buffer) {
    at::Tensor value;
    if (archive.try_read(name, value, is_buffer)) {
      dict.insert(prefix + name, value);
    }
  };
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    read(item.key(), /*is_buffer=*/false);
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    read(item.key(), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::InputArchive inner;
    if (archive.try_read(child.key(), inner)) {
      ReadArchive(*child.value(), prefix + child.key() + ".", inner, dict);
    }
  }
}

}  // namespace

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

absl::Status SetRequiresGradientSync(torch::nn::Module& module, bool required,
                                     bool recurse) {
  return SetReduction(module, recurse, required, std::nullopt);
}

absl::Status SetRequiresAllReduce(torch::nn::Module& module, bool required,
                                  bool recurse) {
  return SetReduction(module, recurse, std::nullopt, required);
}

ReduceScatterHook CompressedReduceScatter(c10::ScalarType dtype) {
  return [dtype](const ReduceScatterCall& call)
             -> absl::StatusOr<std::unique_ptr<Work>> {
    c10::NoGradGuard no_grad;
    const double scale = ScaleFor(call.group, dtype);
    const at::Tensor whole = Compress(call.whole, scale, dtype);
    const int64_t numel = call.own.numel();
    const at::Tensor own = whole.narrow(0, call.group.rank() * numel, numel);
    FSDP_ASSIGN_OR_RETURN(
        std::unique_ptr<Work> work,
        call.group.ReduceScatter(own, whole, ReduceOp::kSum, call.unit));
    return std::make_unique<CompressedWork>(std::move(work), own, scale,
                                            call.own);
  };
}

AllReduceHook CompressedAllReduce(c10::ScalarType dtype) {
  return [dtype](const AllReduceCall& call)
             -> absl::StatusOr<std::unique_ptr<Work>> {
    c10::NoGradGuard no_grad;
    const double scale = ScaleFor(call.group, dtype);
    const at::Tensor own = Compress(call.own, scale, dtype);
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Work> work,
                          call.group.AllReduce(own, ReduceOp::kSum, call.unit));
    return std::make_unique<CompressedWork>(std::move(work), own, scale,
                                            call.own);
  };
}

}  // namespace fsdp
