#include "checkpoint/run/run_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp::checkpoint {
comm::Communicator* RanksOf(torch::nn::Module& module,
                            comm::Communicator* otherwise) {
  auto* const sharded = dynamic_cast<ShardedModuleBase*>(&module);
  return sharded == nullptr ? otherwise : &sharded->communicator();
}

ShardedModel* ShardedOf(torch::nn::Module* module) {
  auto* const sharded = dynamic_cast<ShardedModuleBase*>(module);
  return sharded == nullptr ? nullptr : &sharded->sharded_model();
}

absl::StatusOr<RunValues> RunValues::ReadModel(torch::nn::Module* model,
                                               absl::string_view what) {
  TrainingRun run;
  run.model = model;
  return Read(run, what);
}

absl::StatusOr<RunValues> RunValues::Read(const TrainingRun& run,
                                          absl::string_view what) {
  if (run.model == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": the run has no model: set TrainingRun::model"));
  }
  RunValues values;
  values.sharded_ = ShardedOf(run.model);
  if (values.sharded_ != nullptr) {
    FSDP_ASSIGN_OR_RETURN(WholeAccess access,
                          WholeAccess::BeginAlone(*values.sharded_, what));
    values.access_.emplace(std::move(access));
    values.model_ =
        ReadModelValues(*values.sharded_, *run.model->children().front());
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

absl::Status RunValues::CheckRanks(const Together& together) const {
  if (sharded_ == nullptr) return absl::OkStatus();
  const comm::Communicator& ranks = sharded_->communicator();
  if (ranks.world_size() == together.world_size() &&
      ranks.rank() == together.rank()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the model is sharded over ", ranks.world_size(),
                   " ranks, of which this is ", ranks.rank(),
                   ", but the checkpointer was opened for ",
                   together.world_size(), ", of which this is ",
                   together.rank(), ": open it for the ranks of the model"));
}

c10::Device RunValues::device() const {
  if (sharded_ != nullptr) return sharded_->device();
  return model_.all.empty() ? c10::Device(c10::kCPU)
                            : model_.all.front().values.device();
}

absl::Status RunValues::ReadPlain(const torch::nn::Module& module) {
  std::map<const void*, std::string> first_names;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined()) continue;
    if (IsOfShardedModel(tensor)) {
      // A wrapped module itself has no values while nothing computes.
      return absl::InvalidArgumentError(
          absl::StrCat("the parameter ", item.key(),
                       " belongs to a sharded model: pass the model that "
                       "FullyShard() returned"));
    }
    const auto [first, is_new] =
        first_names.try_emplace(tensor.unsafeGetTensorImpl(), item.key());
    if (is_new) {
      model_.all.push_back(WholeRange(item.key(), tensor));
    } else {
      model_.aliases[item.key()] = first->second;
    }
  }
  model_.num_ranges = model_.num_parameters = model_.all.size();
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
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) continue;
    model_.all.push_back(WholeRange(item.key(), item.value()));
  }
  return absl::OkStatus();
}

namespace {

// Makes `range`, which is whole or row-major, what this rank writes of it.
// `name` is its name in the model.
absl::Status TakePart(int rank, const ModelValues& model,
                      const std::string& name, TensorRange& range) {
  at::Tensor& values = range.values;
  if (range.is_whole) {
    if (values.layout() != c10::kStrided) {
      const bool is_parameter = absl::c_any_of(
          model.parameters(),
          [&name](const TensorRange& one) { return one.name == name; });
      return absl::InvalidArgumentError(
          absl::StrCat(is_parameter ? "parameter " : "buffer ", range.name,
                       " is not strided: no safetensors file can hold it"));
    }
    values = rank == 0
                 ? values.detach().resolve_conj().resolve_neg().contiguous()
                 : at::empty({0}, values.options().requires_grad(false));
    values = values.view({-1});
    range.strides = RowMajorStrides(range.sizes);
    range.is_whole = false;
  } else {
    const auto [from, to] =
        EvenPart(values.numel(), range.replica, range.replicas);
    values = values.detach().narrow(0, from, to - from);
    range.begin += from;
  }
  if (FileDtype(range.file_dtype()).has_value()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor ", range.name, " is of dtype ", c10::toString(range.file_dtype()),
      ", which no safetensors file can hold"));
}

std::optional<std::string> NameInFile(const std::string& name,
                                      const PartOptions& options) {
  return options.names == nullptr ? name : options.names(name);
}

// The parts of `ranges`, which are the model's or laid out as these.
absl::StatusOr<TensorGroup> GroupOf(std::string stem, const RunValues& values,
                                    std::vector<TensorRange> ranges, int rank,
                                    const PartOptions& options) {
  if (values.sharded() != nullptr) {
    FSDP_RETURN_IF_ERROR(MakeRowMajor(*values.sharded(), ranges));
  }
  std::set<std::string> names;
  for (TensorRange& range : ranges) {
    const std::string name =
        std::exchange(range.name, *NameInFile(range.name, options));
    const c10::ScalarType own = range.file_dtype();
    range.dtype =
        c10::isFloatingType(own) ? options.model_dtype.value_or(own) : own;
    FSDP_RETURN_IF_ERROR(TakePart(rank, values.model(), name, range));
    if (names.insert(range.name).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("two tensors of the model have the name ", range.name,
                     " in the files"));
  }
  return TensorGroup{std::move(stem), std::move(ranges)};
}

// What PartsToWrite() goes by where it is collective: ranks whose texts differ
// would wait for each other.
std::string TextOf(const RunValues& values, const PartOptions& options) {
  std::string text = absl::StrCat("dtype: ",
                                  options.model_dtype.has_value()
                                      ? c10::toString(*options.model_dtype)
                                      : "the model's",
                                  "\n");
  for (const TensorRange& range : values.model().ranges()) {
    const std::optional<std::string> name = NameInFile(range.name, options);
    if (name != range.name) {
      absl::StrAppend(&text, range.name, " is ", name.value_or("left out"),
                      "\n");
    }
  }
  if (values.averages().has_value()) text += "an average of the weights\n";
  if (values.optimizer() == nullptr) return text + "no optimizer\n";
  for (const auto& [name, slots] : values.optimizer()->slots) {
    absl::StrAppend(&text, "optimizer of ", name, ":");
    for (const auto& [key, tensor] : slots.tensors) {
      absl::StrAppend(&text, " ", key, " ",
                      c10::toString(tensor.scalar_type()));
    }
    text += '\n';
  }
  return text;
}

}  // namespace

bool IsCollective(const ShardedModel* sharded) {
  return sharded != nullptr &&
         absl::c_any_of(sharded->Ranges(), [](const TensorRange& range) {
           return !range.IsRowMajor();
         });
}

absl::Status CheckSameParts(const Together& together, const RunValues& values,
                            const PartOptions& options) {
  if (!IsCollective(values.sharded())) return absl::OkStatus();
  return together.CheckSame(TextOf(values, options), "what is to be saved");
}

absl::StatusOr<std::vector<TensorGroup>> PartsToWrite(
    const RunValues& values, int rank, const PartOptions& options) {
  if (options.model_dtype.has_value() &&
      !c10::isFloatingType(*options.model_dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "floating-point values cannot be saved as ",
        c10::toString(*options.model_dtype),
        ": name a floating-point dtype, or none, for those that they have"));
  }
  const c10::NoGradGuard no_grad;
  std::vector<TensorGroup> groups;
  std::vector<TensorRange> of_model;
  for (const TensorRange& range : values.model().all) {
    if (NameInFile(range.name, options).has_value()) of_model.push_back(range);
  }
  FSDP_ASSIGN_OR_RETURN(
      TensorGroup model,
      GroupOf(options.model_stem, values, std::move(of_model), rank, options));
  groups.push_back(std::move(model));
  std::map<std::string, std::vector<TensorRange>> states;  // by stem
  if (values.averages().has_value()) states[kAverageStem] = *values.averages();
  if (values.optimizer() != nullptr) {
    for (auto& [key, ranges] :
         SlotRanges(values.model().parameters(), *values.optimizer())) {
      states[absl::StrCat("optimizer/", key)] = std::move(ranges);
    }
  }
  for (auto& [stem, ranges] : states) {
    FSDP_ASSIGN_OR_RETURN(
        TensorGroup group,
        GroupOf(stem, values, std::move(ranges), rank, PartOptions()));
    groups.push_back(std::move(group));
  }
  return groups;
}

namespace {

constexpr std::pair<c10::ScalarType, Dtype> kPairs[] = {
    {c10::ScalarType::Bool, Dtype::kBool},
    {c10::ScalarType::Byte, Dtype::kU8},
    {c10::ScalarType::Char, Dtype::kI8},
    {c10::ScalarType::Float8_e5m2, Dtype::kF8E5M2},
    {c10::ScalarType::Float8_e4m3fn, Dtype::kF8E4M3},
    {c10::ScalarType::Float8_e8m0fnu, Dtype::kF8E8M0},
    {c10::ScalarType::Float8_e4m3fnuz, Dtype::kF8E4M3Fnuz},
    {c10::ScalarType::Float8_e5m2fnuz, Dtype::kF8E5M2Fnuz},
    {c10::ScalarType::Short, Dtype::kI16},
    {c10::ScalarType::UInt16, Dtype::kU16},
    {c10::ScalarType::Half, Dtype::kF16},
    {c10::ScalarType::BFloat16, Dtype::kBF16},
    {c10::ScalarType::Int, Dtype::kI32},
    {c10::ScalarType::UInt32, Dtype::kU32},
    {c10::ScalarType::Float, Dtype::kF32},
    {c10::ScalarType::ComplexFloat, Dtype::kC64},
    {c10::ScalarType::Double, Dtype::kF64},
    {c10::ScalarType::Long, Dtype::kI64},
    {c10::ScalarType::UInt64, Dtype::kU64},
};

}  // namespace

TensorInfo InfoOf(const TensorRange& part) {
  return {part.name, *FileDtype(part.file_dtype()), part.sizes};
}

std::optional<Dtype> FileDtype(c10::ScalarType dtype) {
  for (const auto& [torch, file] : kPairs) {
    if (torch == dtype) return file;
  }
  return std::nullopt;
}

std::optional<c10::ScalarType> TorchDtype(Dtype dtype) {
  for (const auto& [torch, file] : kPairs) {
    if (file == dtype) return torch;
  }
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
