#include "fsdp/state/optimizer_state.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/optimizer_values.h"
#include "fsdp/state/whole_access.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::ParameterSpec;
using ::fsdp::flat_param::Slice;
using torch::optim::Optimizer;

std::string KeyOf(const std::string& parameter, const std::string& slot) {
  return absl::StrCat(parameter, ".", slot);
}

// What ranks have to agree on, a line per parameter.
std::string Fingerprint(const OptimizerValues& view) {
  std::string text;
  for (const auto& [name, slots] : view.slots) {
    absl::StrAppend(&text, name, ":");
    for (const auto& [key, tensor] : slots.tensors) {
      absl::StrAppend(&text, " ", key, " ",
                      c10::toString(tensor.scalar_type()));
    }
    for (const auto& [key, number] : slots.numbers) {
      absl::StrAppend(&text, " ", key, " = ", number);
    }
    absl::StrAppend(&text, "\n");
  }
  for (const OptimizerGroup& group : view.groups) {
    absl::StrAppend(&text, "group of ", absl::StrJoin(group.names, ", "), "\n");
  }
  return text;
}

absl::StatusOr<OptimizerValues> AgreedView(ShardedModel& model,
                                           Optimizer& optimizer) {
  absl::StatusOr<OptimizerValues> view =
      ReadOptimizerValues(model.NamedShards(), optimizer);
  FSDP_RETURN_IF_ERROR(comm::Agree(model.communicator(), view.status(),
                                   "reading an optimizer's state",
                                   DeadlineOf(model)));
  FSDP_RETURN_IF_ERROR(comm::CheckSame(model.communicator(), Fingerprint(*view),
                                       "the optimizers' states",
                                       DeadlineOf(model)));
  return view;
}

std::map<std::string, int64_t> NumbersOf(const OptimizerValues& view) {
  std::map<std::string, int64_t> numbers;
  for (const auto& [name, slots] : view.slots) {
    for (const auto& [key, number] : slots.numbers) {
      numbers[KeyOf(name, key)] = number;
    }
  }
  return numbers;
}

// The names of slots that parameters of `flat` have, with their dtypes.
std::map<std::string, at::ScalarType> SlotsOf(const FlatParameter& flat,
                                              const OptimizerValues& view) {
  std::map<std::string, at::ScalarType> keys;
  for (int i = 0; i < flat.num_parameters(); ++i) {
    const auto slots = view.slots.find(flat.parameter(i).name);
    if (slots == view.slots.end()) continue;
    for (const auto& [key, tensor] : slots->second.tensors) {
      keys.emplace(key, tensor.scalar_type());
    }
  }
  return keys;
}

const at::Tensor* FindSlot(const OptimizerValues& view, const std::string& name,
                           const std::string& key) {
  const auto slots = view.slots.find(name);
  if (slots == view.slots.end()) return nullptr;
  const auto tensor = slots->second.tensors.find(key);
  return tensor == slots->second.tensors.end() ? nullptr : &tensor->second;
}

// Gathers slot `key` of all parameters of `flat`, adds it to `dict`.
absl::Status GatherSlot(ShardedModel& model, int unit,
                        const FlatParameter& flat, const OptimizerValues& view,
                        const std::string& key, at::ScalarType dtype,
                        const StateDictOptions& options,
                        OptimizerStateDict* dict) {
  c10::NoGradGuard no_grad;
  const at::Tensor shard = at::zeros_like(flat.shard().detach(), dtype);
  for (int i = 0; i < flat.num_parameters(); ++i) {
    const at::Tensor* slot = FindSlot(view, flat.parameter(i).name, key);
    if (slot == nullptr) continue;
    const Slice slice = flat.layout().InShard(i, flat.rank());
    const Resident resident = ValueOrThrow(Resident::Of(*slot, Use::kRead));
    shard.narrow(0, slice.begin, slice.numel()).copy_(*slot);
  }
  FSDP_ASSIGN_OR_RETURN(
      const at::Tensor whole,
      GatherShards(model, unit, shard,
                   absl::StrCat(model.unit_name(unit), "/", key)));
  if (options.rank0_only && model.communicator().rank() != 0) {
    return absl::OkStatus();
  }
  for (int i = 0; i < flat.num_parameters(); ++i) {
    const std::string& name = flat.parameter(i).name;
    if (FindSlot(view, name, key) == nullptr) continue;
    at::Tensor value = flat.ViewOf(whole, i).clone();
    if (options.offload_to_cpu) value = value.cpu();
    dict->tensors.insert(KeyOf(name, key), value);
  }
  return absl::OkStatus();
}

// "blocks.0.weight.exp_avg" as parameter and slot.
absl::StatusOr<std::pair<std::string, std::string>> SplitKey(
    const std::string& key,
    const std::map<std::string, OptimizerSlots>& known) {
  const size_t dot = key.rfind('.');
  if (dot != std::string::npos && known.count(key.substr(0, dot)) > 0) {
    return std::make_pair(key.substr(0, dot), key.substr(dot + 1));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the state has ", key, ", but the optimizer has no such parameter"));
}

// The parameters of `view`'s groups, with no slots yet.
std::map<std::string, OptimizerSlots> Known(const OptimizerValues& view) {
  std::map<std::string, OptimizerSlots> known;
  for (const OptimizerGroup& group : view.groups) {
    for (const std::string& name : group.names) known[name];
  }
  return known;
}

using SpecByName = std::map<std::string, const ParameterSpec*>;

SpecByName SpecsOf(const ShardedModel& model) {
  SpecByName specs;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      for (int i = 0; i < flat->num_parameters(); ++i) {
        specs[flat->parameter(i).name] = &flat->layout().parameter(i);
      }
    }
  }
  return specs;
}

// Pieces lie in the storage order of the parameter they were taken from.
absl::Status CheckShape(const std::string& key, const ParameterPiece& piece,
                        const ParameterSpec& spec) {
  if (piece.sizes != spec.sizes) {
    return absl::InvalidArgumentError(
        absl::StrCat(key, ": shape [", absl::StrJoin(piece.sizes, ", "),
                     "] instead of [", absl::StrJoin(spec.sizes, ", "), "]"));
  }
  if (piece.strides == spec.strides) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(key, ": strides [", absl::StrJoin(piece.strides, ", "),
                   "] instead of [", absl::StrJoin(spec.strides, ", "),
                   "]: give the parameter the memory format it had"));
}

absl::StatusOr<OptimizerReplacement> PlanLoad(
    const ShardedModel& model, Optimizer& optimizer,
    absl::Span<const ParameterPiece> pieces,
    const std::map<std::string, int64_t>& numbers,
    const std::vector<OptimizerGroup>& groups) {
  FSDP_ASSIGN_OR_RETURN(const OptimizerValues view,
                        ReadOptimizerValues(model.NamedShards(), optimizer));
  std::map<std::string, OptimizerSlots> values = Known(view);
  const SpecByName specs = SpecsOf(model);
  std::map<std::string, std::vector<const ParameterPiece*>> by_key;
  for (const ParameterPiece& piece : pieces) {
    by_key[piece.name].push_back(&piece);
  }
  std::map<std::string, const NamedShard*> shards;
  for (const NamedShard& named : model.NamedShards()) {
    shards[named.name] = &named;
  }
  for (const auto& [key, of_key] : by_key) {
    FSDP_ASSIGN_OR_RETURN(const auto names, SplitKey(key, values));
    const NamedShard& named = *shards[names.first];
    for (const ParameterPiece* piece : of_key) {
      FSDP_RETURN_IF_ERROR(CheckShape(key, *piece, *specs.at(names.first)));
    }
    at::Tensor& own = values[names.first].tensors[names.second];
    own = at::empty_like(named.shard.detach(),
                         of_key.front()->values.scalar_type());
    const absl::Status copied = CopyFromPieces(of_key, named.begin, own);
    if (!copied.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(key, ": ", copied.message()));
    }
  }
  for (const auto& [key, number] : numbers) {
    FSDP_ASSIGN_OR_RETURN(const auto names, SplitKey(key, values));
    values[names.first].numbers[names.second] = number;
  }
  return PlanReplacement(model.NamedShards(), optimizer, view, values, groups);
}

}  // namespace

absl::StatusOr<OptimizerStateDict> GatherOptimizerState(
    ShardedModel& model, Optimizer& optimizer,
    const StateDictOptions& options) {
  return InWholeAccess(
      model, "GatherOptimizerState()",
      [&]() -> absl::StatusOr<OptimizerStateDict> {
        FSDP_ASSIGN_OR_RETURN(const OptimizerValues view,
                              AgreedView(model, optimizer));
        OptimizerStateDict dict;
        for (int unit = 0; unit < model.num_units(); ++unit) {
          for (const auto& flat : model.flats(unit)) {
            for (const auto& [key, dtype] : SlotsOf(*flat, view)) {
              FSDP_RETURN_IF_ERROR(GatherSlot(model, unit, *flat, view, key,
                                              dtype, options, &dict));
            }
          }
        }
        if (options.rank0_only && model.communicator().rank() != 0) return dict;
        dict.numbers = NumbersOf(view);
        dict.groups = view.groups;
        return dict;
      });
}

absl::StatusOr<ShardedOptimizerState> MakeShardedOptimizerState(
    ShardedModel& model, Optimizer& optimizer) {
  return InWholeAccess(
      model, "MakeShardedOptimizerState()",
      [&]() -> absl::StatusOr<ShardedOptimizerState> {
        FSDP_ASSIGN_OR_RETURN(const OptimizerValues view,
                              AgreedView(model, optimizer));
        ShardedOptimizerState result{{}, NumbersOf(view), view.groups};
        for (int unit = 0; unit < model.num_units(); ++unit) {
          for (const auto& flat : model.flats(unit)) {
            for (int i = 0; i < flat->num_parameters(); ++i) {
              const ParameterSpec& spec = flat->layout().parameter(i);
              const auto slots = view.slots.find(spec.name);
              if (slots == view.slots.end()) continue;
              for (const auto& [key, tensor] : slots->second.tensors) {
                const Resident resident =
                    ValueOrThrow(Resident::Of(tensor, Use::kRead));
                result.tensors.push_back(
                    {KeyOf(spec.name, key), spec.sizes, spec.strides,
                     flat->layout().InParameter(i, flat->rank()).begin,
                     tensor.detach().clone()});
              }
            }
          }
        }
        return result;
      });
}

absl::Status LoadShardedOptimizerState(
    ShardedModel& model, Optimizer& optimizer,
    absl::Span<const ParameterPiece> tensors,
    const std::map<std::string, int64_t>& numbers,
    const std::vector<OptimizerGroup>& groups) {
  return InWholeAccess(
      model, "LoadShardedOptimizerState()", [&]() -> absl::Status {
        absl::StatusOr<OptimizerReplacement> replacement =
            PlanLoad(model, optimizer, tensors, numbers, groups);
        FSDP_RETURN_IF_ERROR(
            comm::Agree(model.communicator(), replacement.status(),
                        "loading an optimizer's state", DeadlineOf(model)));
        Apply(*std::move(replacement), optimizer);
        return comm::Agree(model.communicator(), TakeUpStates(optimizer),
                           "storing a loaded optimizer's state",
                           DeadlineOf(model));
      });
}

absl::Status LoadOptimizerState(ShardedModel& model, Optimizer& optimizer,
                                const OptimizerStateDict& dict) {
  // A whole tensor is one piece, in the storage order of its parameter.
  const SpecByName specs = SpecsOf(model);
  std::vector<ParameterPiece> pieces;
  for (const auto& item : dict.tensors) {
    const std::string& key = item.key();
    const at::Tensor& value = item.value();
    const auto spec = specs.find(key.substr(0, key.rfind('.')));
    const bool fits =
        spec != specs.end() && value.sizes() == spec->second->sizes;
    pieces.push_back({key, value.sizes().vec(),
                      fits ? spec->second->strides : value.strides().vec(), 0,
                      fits ? flat_param::StorageOrderOf(value, *spec->second)
                           : value.reshape({-1})});
  }
  return LoadShardedOptimizerState(model, optimizer, pieces, dict.numbers,
                                   dict.groups);
}

}  // namespace fsdp
