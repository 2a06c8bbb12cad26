#include <ATen/ops/empty_like.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"
#include "fsdp/state/whole_model.h"

namespace fsdp {
namespace {

using torch::optim::Optimizer;

std::string KeyOf(const std::string& parameter, const std::string& slot) {
  return absl::StrCat(parameter, ".", slot);
}

// Returns what ranks have to agree on, a line per parameter.
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
      ReadOptimizerValues(model.Ranges(), optimizer);
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

// Pieces lie in the storage order of the parameter they were taken from.
absl::Status CheckShape(const TensorRange& piece, const TensorRange& leaf) {
  if (piece.sizes != leaf.sizes) {
    return absl::InvalidArgumentError(
        absl::StrCat(piece.name, ": shape [", absl::StrJoin(piece.sizes, ", "),
                     "] instead of [", absl::StrJoin(leaf.sizes, ", "), "]"));
  }
  FSDP_RETURN_IF_ERROR(Annotate(CheckHasValues(piece.values), piece.name));
  if (piece.is_whole || piece.strides == leaf.strides) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      piece.name, ": strides [", absl::StrJoin(piece.strides, ", "),
      "] instead of [", absl::StrJoin(leaf.strides, ", "),
      "]: give the parameter the memory format it had"));
}

absl::StatusOr<OptimizerReplacement> PlanLoad(
    const ShardedModel& model, Optimizer& optimizer,
    absl::Span<const TensorRange> pieces,
    const std::map<std::string, int64_t>& numbers,
    const std::vector<OptimizerGroup>& groups) {
  FSDP_ASSIGN_OR_RETURN(const OptimizerValues view,
                        ReadOptimizerValues(model.Ranges(), optimizer));
  std::map<std::string, OptimizerSlots> values;  // of all in groups
  for (const OptimizerGroup& group : view.groups) {
    for (const std::string& name : group.names) values[name];
  }
  std::map<std::string, std::vector<const TensorRange*>> by_key;
  for (const TensorRange& piece : pieces) by_key[piece.name].push_back(&piece);
  std::map<std::string, const TensorRange*> leaves;
  for (const TensorRange& leaf : model.Ranges()) leaves[leaf.name] = &leaf;
  for (const auto& [key, of_key] : by_key) {
    FSDP_ASSIGN_OR_RETURN(const auto names, SplitKey(key, values));
    TensorRange own = *leaves[names.first];
    for (const TensorRange* piece : of_key) {
      FSDP_RETURN_IF_ERROR(CheckShape(*piece, own));
    }
    own.values = at::empty_like(own.values.detach(),
                                of_key.front()->values.scalar_type());
    values[names.first].tensors[names.second] = own.values;
    const absl::Status covered = CheckCovered(of_key, own.begin, own.end());
    if (!covered.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(key, ": ", covered.message()));
    }
    CopyFromPieces(of_key, own);
  }
  for (const auto& [key, number] : numbers) {
    FSDP_ASSIGN_OR_RETURN(const auto names, SplitKey(key, values));
    values[names.first].numbers[names.second] = number;
  }
  return PlanReplacement(model.Ranges(), optimizer, view, values, groups);
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
        const bool keeps =
            !options.rank0_only || model.communicator().rank() == 0;
        OptimizerStateDict dict;
        for (const auto& [key, ranges] : SlotRanges(model.Ranges(), view)) {
          const auto add = [&, &key = key, &ranges = ranges](
                               size_t i, const at::Tensor& whole) {
            if (!keeps) return;
            at::Tensor value = whole.clone();
            if (options.offload_to_cpu) value = value.cpu();
            dict.tensors.insert(KeyOf(ranges[i].name, key), value);
          };
          FSDP_RETURN_IF_ERROR(ForEachWhole(model, ranges, add));
        }
        if (!keeps) return dict;
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
        for (auto& [key, ranges] : SlotRanges(model.Ranges(), view)) {
          for (TensorRange& range : ranges) {
            const Resident resident =
                ValueOrThrow(Resident::Of(range.values, Use::kRead));
            range.name = KeyOf(range.name, key);
            range.values = range.values.detach().clone();
            result.tensors.push_back(std::move(range));
          }
        }
        return result;
      });
}

absl::Status LoadShardedOptimizerState(
    ShardedModel& model, Optimizer& optimizer,
    absl::Span<const TensorRange> tensors,
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
  std::vector<TensorRange> wholes;
  for (const auto& item : dict.tensors) {
    wholes.push_back(WholeRange(item.key(), item.value()));
  }
  return LoadShardedOptimizerState(model, optimizer, wholes, dict.numbers,
                                   dict.groups);
}

}  // namespace fsdp
