#include "checkpoint/run/run_values.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/tensor_bytes.h"
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

// Returns what PartsToWrite() goes by where it is collective: ranks whose texts
// differ would wait for each other.
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

TensorInfo InfoOf(const TensorRange& part) {
  return {part.name, *FileDtype(part.file_dtype()), part.sizes};
}

namespace {

constexpr absl::string_view kRandom = "random.";
constexpr absl::string_view kEntry = "entry.";

// Returns the generator of the CPU, and that of `device` where it has its own.
std::vector<std::pair<std::string, at::Generator>> Generators(
    c10::Device device) {
  std::vector<std::pair<std::string, at::Generator>> generators = {
      {"cpu", at::detail::getDefaultCPUGenerator()}};
  if (device.is_cuda()) {
    generators.emplace_back("cuda",
                            at::globalContext().defaultGenerator(device));
  }
  return generators;
}

}  // namespace

std::string RankFileName(int rank) {
  return absl::StrFormat("ranks/rank-%05d.safetensors", rank);
}

std::string BuffersFileName(int rank) {
  return absl::StrFormat("ranks/buffers-%05d.safetensors", rank);
}

absl::StatusOr<std::string> Format(const SmallFile& file) {
  std::vector<TensorInfo> infos;
  for (const auto& [name, tensor] : file.tensors) {
    const std::optional<Dtype> dtype = FileDtype(tensor.scalar_type());
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", name, " is of dtype ", c10::toString(tensor.scalar_type()),
          ", which no safetensors file can hold"));
    }
    infos.push_back({name, *dtype, tensor.sizes().vec()});
  }
  FSDP_ASSIGN_OR_RETURN(const auto placed, PlaceTensors(infos));
  FSDP_ASSIGN_OR_RETURN(std::string bytes,
                        FormatSafetensorsHeader(placed, file.texts));
  const size_t data_begin = bytes.size();
  for (const PlacedTensor& tensor : placed) {
    if (tensor.end + data_begin > bytes.size()) {
      bytes.resize(tensor.end + data_begin);
    }
    const at::Tensor values = file.tensors.at(tensor.info.name).contiguous();
    if (values.numel() == 0) continue;
    std::memcpy(&bytes[data_begin + tensor.begin], values.const_data_ptr(),
                tensor.end - tensor.begin);
  }
  return bytes;
}

absl::StatusOr<SmallFile> ParseSmallFile(absl::string_view bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  FSDP_ASSIGN_OR_RETURN(
      const int64_t length,
      ParseSafetensorsLength(bytes.substr(0, kSafetensorsLengthBytes), size));
  FSDP_ASSIGN_OR_RETURN(
      const SafetensorsHeader header,
      ParseSafetensorsHeader(bytes.substr(kSafetensorsLengthBytes, length),
                             size));
  SmallFile file;
  file.texts = header.metadata;
  for (const PlacedTensor& tensor : header.tensors) {
    const auto dtype = TorchDtype(tensor.info.dtype);
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", tensor.info.name, " is of dtype ",
                       NameOf(tensor.info.dtype), ", which LibTorch lacks"));
    }
    const at::Tensor values = at::empty(tensor.info.shape, *dtype);
    if (values.numel() > 0) {
      std::memcpy(values.mutable_data_ptr(),
                  bytes.data() + header.data_begin + tensor.begin,
                  tensor.end - tensor.begin);
    }
    file.tensors[tensor.info.name] = values;
  }
  return file;
}

SmallFile TakeRankValues(const TrainingRun& run, c10::Device device) {
  SmallFile file;
  for (const auto& [name, text] : run.rank_entries) {
    file.texts[absl::StrCat(kEntry, name)] = text;
  }
  if (!run.random_state) return file;
  for (auto& [name, generator] : Generators(device)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    file.tensors[absl::StrCat(kRandom, name)] =
        at::Tensor(generator.unsafeGetGeneratorImpl()->get_state());
  }
  return file;
}

void RestoreRankValues(const SmallFile& file, c10::Device device,
                       TrainingRun& run) {
  run.rank_entries.clear();
  for (const auto& [name, text] : file.texts) {
    absl::string_view entry = name;
    if (!absl::ConsumePrefix(&entry, kEntry)) continue;
    run.rank_entries[std::string(entry)] = text;
  }
  if (!run.random_state) return;
  for (auto& [name, generator] : Generators(device)) {
    const auto state = file.tensors.find(absl::StrCat(kRandom, name));
    if (state == file.tensors.end()) continue;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state->second);
  }
}

SmallFile TakeWholeValues(const ModelValues& model) {
  const NormalMode normal;
  const c10::NoGradGuard no_grad;
  SmallFile file;
  for (const TensorRange& other : model.others()) {
    if (other.values.layout() != c10::kStrided) continue;
    at::Tensor copy = at::empty(other.sizes, other.file_dtype());
    copy.copy_(other.values);
    file.tensors[other.name] = copy;
  }
  return file;
}

}  // namespace fsdp::checkpoint
