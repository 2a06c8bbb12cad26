#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/named_values.h"
#include "fsdp/state/state_dict.h"
#include "fsdp/state/state_dict_load.h"
#include "fsdp/state/whole_access.h"

namespace fsdp {
namespace {

std::string LayoutText(const std::string& unit,
                       const flat_param::FlatLayout& layout) {
  return absl::StrCat("unit ", unit, " over ", layout.world_size(), " ranks\n",
                      layout.ToString());
}

absl::Status CheckLocal(const ShardedModel& model, const LocalStateDict& dict) {
  const comm::Communicator& world = model.communicator();
  std::vector<std::string> differences;
  const auto compare = [&](const char* what, int64_t theirs, int64_t ours) {
    if (theirs == ours) return;
    differences.push_back(
        absl::StrCat(what, " ", theirs, " instead of ", ours));
  };
  compare("of a world of size", dict.world_size, world.world_size());
  compare("of rank", dict.rank, world.rank());
  size_t next = 0;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      if (next >= dict.flats.size()) break;
      const LocalFlat& local = dict.flats[next++];
      const std::string ours =
          LayoutText(model.unit_name(unit), flat->layout());
      const std::string theirs = LayoutText(local.unit, local.layout);
      if (ours != theirs) {
        differences.push_back(
            absl::StrCat("has\n", theirs, "  instead of\n", ours));
      }
      compare("a shard of elements:", local.shard.numel(),
              flat->shard().numel());
      const std::string dtype =
          DtypeDifference(local.shard.scalar_type(), flat->dtype());
      if (!dtype.empty()) {
        differences.push_back(
            absl::StrCat("unit ", local.unit, " has ", dtype));
      }
    }
  }
  int flats = 0;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    flats += static_cast<int>(model.flats(unit).size());
  }
  compare("flat parameters:", static_cast<int64_t>(dict.flats.size()), flats);
  return Differ("the local state dict", differences);
}

absl::Status NotOneModel(const std::vector<std::string>& differences) {
  if (differences.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the local state dicts are not those of all ranks of one model:\n  ",
      absl::StrJoin(differences, "\n  ")));
}

}  // namespace

absl::StatusOr<LocalStateDict> MakeLocalStateDict(
    ShardedModel& model, const torch::nn::Module& module) {
  return InWholeAccess(
      model, "MakeLocalStateDict()",
      [&]() -> absl::StatusOr<LocalStateDict> {
        const comm::Communicator& world = model.communicator();
        LocalStateDict dict;
        dict.rank = world.rank();
        dict.world_size = world.world_size();
        for (int unit = 0; unit < model.num_units(); ++unit) {
          for (const auto& flat : model.flats(unit)) {
            const Resident resident =
                ValueOrThrow(Resident::Of(flat->shard(), Use::kRead));
            dict.flats.push_back({model.unit_name(unit), flat->layout(),
                                  flat->rank(),
                                  flat->shard().detach().clone()});
          }
        }
        const NamedValues values = ReadNamedValues(model, module);
        for (const NamedValues::Parameter& named : values.parameters) {
          const std::string& first =
              named.place.flat->parameter(named.place.index).name;
          if (named.name != first) dict.tied[named.name] = first;
        }
        AddOthers(values, /*to_cpu=*/false, dict.others);
        return dict;
      },
      /*reads_values=*/true);
}

absl::Status LoadLocalStateDict(ShardedModel& model,
                                const torch::nn::Module& module,
                                const LocalStateDict& dict) {
  return InWholeAccess(model, "LoadLocalStateDict()", [&]() -> absl::Status {
    NamedValues others = ReadNamedValues(model, module);
    others.parameters.clear();
    absl::Status status = CheckLocal(model, dict);
    absl::StatusOr<LoadPlan> plan =
        PlanLoad(others, dict.others, /*strict=*/true);
    if (status.ok()) status = plan.status();
    FSDP_RETURN_IF_ERROR(comm::Agree(model.communicator(), status,
                                     "loading a local state dict",
                                     DeadlineOf(model)));
    std::vector<at::Tensor> shards;
    shards.reserve(dict.flats.size());
    for (const LocalFlat& flat : dict.flats) shards.push_back(flat.shard);
    OverwriteShards(model, shards);
    Apply(*plan);
    return absl::OkStatus();
  });
}

absl::StatusOr<StateDict> ConsolidateLocalStateDicts(
    absl::Span<const LocalStateDict> dicts) {
  std::map<int, const LocalStateDict*> by_rank;
  std::vector<std::string> differences;
  for (const LocalStateDict& dict : dicts) {
    if (!by_rank.emplace(dict.rank, &dict).second) {
      differences.push_back(absl::StrCat("rank ", dict.rank, " twice"));
    }
    if (dict.flats.size() != dicts.front().flats.size() ||
        dict.world_size != static_cast<int>(dicts.size())) {
      differences.push_back(
          absl::StrCat("rank ", dict.rank, ": ", dict.flats.size(),
                       " flat parameters of ", dict.world_size, " ranks"));
    }
    if (dict.tied != dicts.front().tied) {
      differences.push_back(
          absl::StrCat("rank ", dict.rank, ": other parameters are tied"));
    }
  }
  if (dicts.empty()) differences.push_back("no dicts");
  FSDP_RETURN_IF_ERROR(NotOneModel(differences));
  StateDict result;
  for (size_t k = 0; k < dicts.front().flats.size(); ++k) {
    const flat_param::FlatLayout& layout = dicts.front().flats[k].layout;
    std::map<int, at::Tensor> shards;  // replicas are equal
    for (const LocalStateDict& dict : dicts) {
      const LocalFlat& flat = dict.flats[k];
      if (LayoutText(flat.unit, flat.layout) !=
          LayoutText(dicts.front().flats[k].unit, layout)) {
        differences.push_back(absl::StrCat("rank ", dict.rank, ": unit ",
                                           flat.unit, " lies differently"));
      }
      shards[flat.rank] = flat.shard;
    }
    if (static_cast<int>(shards.size()) != layout.world_size()) {
      differences.push_back(absl::StrCat("unit ", dicts.front().flats[k].unit,
                                         ": ", shards.size(), " shards of ",
                                         layout.world_size()));
    }
    FSDP_RETURN_IF_ERROR(NotOneModel(differences));
    std::vector<at::Tensor> parts;
    parts.reserve(shards.size());
    for (const auto& [rank, shard] : shards) parts.push_back(shard);
    const at::Tensor whole = at::cat(parts);
    for (int i = 0; i < layout.num_parameters(); ++i) {
      const flat_param::ParameterSpec& spec = layout.parameter(i);
      result.insert(
          spec.name,
          whole.as_strided(spec.sizes, spec.strides, layout.InFlat(i).begin)
              .clone());
    }
  }
  for (const auto& [name, first] : dicts.front().tied) {
    const at::Tensor* value = result.find(first);
    if (value == nullptr) {
      return NotOneModel({absl::StrCat(name, ": there is no ", first)});
    }
    result.insert(name, at::Tensor(*value));
  }
  for (const auto& item : dicts.front().others) {
    result.insert(item.key(), item.value());
  }
  return result;
}

}  // namespace fsdp
