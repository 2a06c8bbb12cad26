#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/whole_model.h"

namespace fsdp {
namespace {

constexpr int kWriter = 0;  // the rank that rank0_only means

// --- Taking -----------------------------------------------------------------

at::Tensor CopyOf(const at::Tensor& tensor, c10::ScalarType dtype,
                  bool to_cpu) {
  c10::NoGradGuard no_grad;
  const c10::Device device = to_cpu ? c10::Device(c10::kCPU) : tensor.device();
  if (tensor.scalar_type() == dtype && tensor.device() == device) {
    return tensor.detach().clone();
  }
  return tensor.detach().to(device, dtype);
}

void AddOthers(const ModelValues& values, bool to_cpu, StateDict& dict) {
  for (const TensorRange& other : values.others()) {
    dict.insert(other.name, CopyOf(other.values, other.file_dtype(), to_cpu));
  }
}

absl::StatusOr<StateDict> GatherFull(ShardedModel& model,
                                     const torch::nn::Module& module,
                                     const StateDictOptions& options) {
  const bool keeps =
      !options.rank0_only || model.communicator().rank() == kWriter;
  std::map<std::string, at::Tensor> gathered;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      FSDP_ASSIGN_OR_RETURN(const at::Tensor whole,
                            GatherShards(model, unit, flat->shard()));
      for (int i = 0; keeps && i < flat->num_parameters(); ++i) {
        gathered[flat->parameter(i).name] = CopyOf(
            flat->ViewOf(whole, i), flat->dtype(), options.offload_to_cpu);
      }
    }
  }
  StateDict dict;
  if (!keeps) return dict;
  const ModelValues values = ReadModelValues(model, module);
  for (const auto& item : module.named_parameters()) {
    const auto alias = values.aliases.find(item.key());
    const auto found = gathered.find(
        alias == values.aliases.end() ? item.key() : alias->second);
    if (found != gathered.end()) dict.insert(item.key(), found->second);
  }
  AddOthers(values, options.offload_to_cpu, dict);
  return dict;
}

// --- Loading ----------------------------------------------------------------

std::string SizesText(at::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

// Returns why `source` cannot become what `target` is, or an empty string if it
// can. Only bytes become bytes.
std::string MisfitOf(const TensorRange& source, const TensorRange& target) {
  const bool is_piece = !source.is_whole;
  if (is_piece && target.is_whole) return "a range instead of all of it";
  if (!source.values.defined() || source.sizes != target.sizes ||
      (is_piece && source.strides != target.strides)) {
    const auto text = [is_piece](const TensorRange& range) {
      return absl::StrCat(
          SizesText(range.sizes),
          is_piece ? " with strides " + SizesText(range.strides) : "");
    };
    return absl::StrCat("shape ",
                        source.values.defined() ? text(source) : "undefined",
                        " instead of ", SizesText(target.sizes),
                        is_piece ? " with " + SizesText(target.strides) : "");
  }
  const c10::ScalarType from = source.values.scalar_type();
  const c10::ScalarType to = target.file_dtype();
  const bool is_floating = c10::isFloatingType(to);
  const bool is_complex = c10::isComplexType(to);
  const bool fits = to == c10::kByte
                        ? from == to
                        : c10::isFloatingType(from) == is_floating &&
                              c10::isComplexType(from) == is_complex;
  if (fits) return std::string(CheckHasValues(source.values).message());
  return absl::StrCat("dtype ", c10::toString(from), " instead of ",
                      is_floating        ? "a floating-point one"
                      : is_complex       ? "a complex one"
                      : to == c10::kByte ? "Byte"
                                         : "an integral one");
}

// A value of the model, and what fills it: one tensor or pieces.
struct Filled {
  const TensorRange* target;
  std::vector<const TensorRange*> pieces;
};

// Returns why `pieces` cannot fill `target`, or an empty string if they can.
std::string DifferenceOf(const std::vector<const TensorRange*>& pieces,
                         const TensorRange& target) {
  for (const TensorRange* piece : pieces) {
    std::string difference = MisfitOf(*piece, target);
    if (!difference.empty()) return difference;
  }
  if (!target.is_whole) {
    return std::string(
        CheckCovered(pieces, target.begin, target.end()).message());
  }
  return CanHold(target.values, pieces.front()->values)
             ? ""
             : "values differ where the model's buffer is expanded";
}

// Plans to fill a model from ranges, for which any name of a tied parameter
// will do. Whole tensors are ranges, too. InvalidArgument lists every
// difference; `what` is loaded.
absl::StatusOr<std::vector<Filled>> PlanFill(
    const ModelValues& values, absl::Span<const TensorRange> sources,
    bool strict, absl::string_view what) {
  std::map<std::string, std::vector<const TensorRange*>> by_name;
  for (const TensorRange& source : sources) {
    by_name[source.name].push_back(&source);
  }
  std::map<std::string, std::vector<std::string>> aliases;  // by first name
  for (const auto& [alias, name] : values.aliases) {
    aliases[name].push_back(alias);
  }
  std::set<std::string> known;
  std::vector<std::string> differences;
  std::vector<Filled> plan;
  for (const TensorRange& target : values.all) {
    std::vector<std::string> names = aliases[target.name];
    names.insert(names.begin(), target.name);
    Filled filled{&target, {}};
    for (const std::string& name : names) {
      known.insert(name);
      const auto found = by_name.find(name);
      if (found == by_name.end()) continue;
      const std::string difference = DifferenceOf(found->second, target);
      if (!difference.empty()) {
        differences.push_back(absl::StrCat(name, ": ", difference));
      }
      if (filled.pieces.empty()) filled.pieces = found->second;
    }
    if (!filled.pieces.empty()) {
      plan.push_back(std::move(filled));
    } else if (strict) {
      differences.push_back("missing: " + target.name);
    }
  }
  for (const TensorRange& source : sources) {
    if (strict && known.insert(source.name).second) {
      differences.push_back("unexpected: " + source.name);
    }
  }
  if (differences.empty()) return plan;
  return absl::InvalidArgumentError(
      absl::StrCat(what, " does not fit the model, which is as before:\n  ",
                   absl::StrJoin(differences, "\n  ")));
}

void Fill(const std::vector<Filled>& plan) {
  const c10::NoGradGuard no_grad;
  Resident held;
  for (const auto& [target, pieces] : plan) {
    if (target->is_whole) {
      CopyInto(target->values, pieces.front()->values);
      continue;
    }
    // Released once the next is held: parameters of a unit share their memory.
    Resident next = ValueOrThrow(Resident::Of(target->values, Use::kUpdate));
    held = std::move(next);
    CopyFromPieces(pieces, *target);
  }
}

std::vector<TensorRange> RangesOf(const StateDict& dict) {
  std::vector<TensorRange> ranges;
  for (const auto& item : dict) {
    ranges.push_back(WholeRange(item.key(), item.value()));
  }
  return ranges;
}

// Rank 0 has checked its dict and planned; values travel one after the other.
absl::Status FillFromWriter(ShardedModel& model, const ModelValues& values,
                            const StateDict& dict) {
  // Rank 0 tells the names that it has, a line each.
  FSDP_ASSIGN_OR_RETURN(
      const std::string names,
      comm::BroadcastString(model.communicator(),
                            absl::StrJoin(dict.keys(), "\n"), kWriter,
                            "names of a state dict", DeadlineOf(model)));
  std::map<std::string, std::string> sent;  // by first name
  for (const std::string& name :
       std::set<std::string>(absl::StrSplit(names, '\n', absl::SkipEmpty()))) {
    const auto alias = values.aliases.find(name);
    if (alias == values.aliases.end()) {
      sent[name] = name;
    } else {
      sent.try_emplace(alias->second, name);
    }
  }
  const c10::NoGradGuard no_grad;
  for (const TensorRange& target : values.all) {
    const auto name = sent.find(target.name);
    if (name == sent.end()) continue;
    const TensorRange piece = WholeRange(
        name->second, at::empty(target.sizes, target.values.options()
                                                  .dtype(target.file_dtype())
                                                  .requires_grad(false)));
    if (model.communicator().rank() == kWriter) {
      at::Tensor(piece.values).copy_(dict[name->second]);
    }
    if (piece.values.numel() > 0) {
      FSDP_RETURN_IF_ERROR(comm::BroadcastTensor(
          model.communicator(), piece.values.view({-1}).view(at::kByte),
          kWriter, piece.name, DeadlineOf(model)));
    }
    Fill({{&target, {&piece}}});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StateDict> GatherStateDict(ShardedModel& model,
                                          const torch::nn::Module& module,
                                          const StateDictOptions& options) {
  return InWholeAccess(
      model, "GatherStateDict()",
      [&] { return GatherFull(model, module, options); },
      /*reads_values=*/true);
}

absl::Status LoadStateDict(ShardedModel& model, const torch::nn::Module& module,
                           const StateDict& dict, const LoadOptions& options) {
  return InWholeAccess(model, "LoadStateDict()", [&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(comm::CheckSame(
        model.communicator(), absl::StrCat("rank0_only ", options.rank0_only),
        "the options of LoadStateDict()", DeadlineOf(model)));
    const ModelValues values = ReadModelValues(model, module);
    for (const TensorRange& other : values.others()) {
      // How many elements a sparse one has is known to rank 0 only.
      if (!options.rank0_only || other.values.layout() == c10::kStrided) {
        continue;
      }
      return absl::UnimplementedError(absl::StrCat(
          "buffer ", other.name,
          " is sparse, and LoadOptions::rank0_only sends dense ones only: pass "
          "the state dict on all ranks"));
    }
    const std::vector<TensorRange> sources = RangesOf(dict);
    absl::StatusOr<std::vector<Filled>> plan = std::vector<Filled>();
    if (!options.rank0_only || model.communicator().rank() == kWriter) {
      plan = PlanFill(values, sources, options.strict, "the state dict");
    }
    FSDP_RETURN_IF_ERROR(comm::Agree(model.communicator(), plan.status(),
                                     "loading a state dict",
                                     DeadlineOf(model)));
    if (options.rank0_only) return FillFromWriter(model, values, dict);
    Fill(*plan);
    return absl::OkStatus();
  });
}

absl::StatusOr<ShardedStateDict> MakeShardedStateDict(
    ShardedModel& model, const torch::nn::Module& module) {
  return InWholeAccess(
      model, "MakeShardedStateDict()",
      [&]() -> absl::StatusOr<ShardedStateDict> {
        const ModelValues values = ReadModelValues(model, module);
        ShardedStateDict dict;
        Resident held;
        for (const TensorRange& range : values.ranges()) {
          Resident next = ValueOrThrow(Resident::Of(range.values, Use::kRead));
          held = std::move(next);
          dict.parameters.push_back(range.With(range.values.detach().clone()));
        }
        AddOthers(values, /*to_cpu=*/false, dict.others);
        return dict;
      },
      /*reads_values=*/true);
}

absl::Status LoadShardedStateDict(ShardedModel& model,
                                  const torch::nn::Module& module,
                                  absl::Span<const TensorRange> pieces,
                                  const StateDict& others) {
  return InWholeAccess(model, "LoadShardedStateDict()", [&]() -> absl::Status {
    const ModelValues values = ReadModelValues(model, module);
    std::vector<TensorRange> sources = RangesOf(others);
    sources.insert(sources.end(), pieces.begin(), pieces.end());
    const absl::StatusOr<std::vector<Filled>> plan =
        PlanFill(values, sources, /*strict=*/true, "the sharded state dict");
    FSDP_RETURN_IF_ERROR(comm::Agree(model.communicator(), plan.status(),
                                     "loading a sharded state dict",
                                     DeadlineOf(model)));
    Fill(*plan);
    return absl::OkStatus();
  });
}

}  // namespace fsdp
