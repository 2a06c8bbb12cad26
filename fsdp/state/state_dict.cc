#include "fsdp/state/state_dict.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/named_values.h"
#include "fsdp/state/state_dict_load.h"
#include "fsdp/state/whole_access.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;

constexpr int kWriter = 0;  // the rank that rank0_only means

// The names that rank 0 has, a line each.
absl::StatusOr<std::set<std::string>> NamesOfWriter(ShardedModel& model,
                                                    const StateDict& dict) {
  std::vector<std::string> names = dict.keys();
  FSDP_ASSIGN_OR_RETURN(
      const std::string text,
      comm::BroadcastString(model.communicator(), absl::StrJoin(names, "\n"),
                            kWriter, "names of a state dict",
                            DeadlineOf(model)));
  return std::set<std::string>(absl::StrSplit(text, '\n', absl::SkipEmpty()));
}

// `dict`'s value on rank 0, room for it on the others, of `like`'s sizes.
absl::StatusOr<at::Tensor> FromWriter(ShardedModel& model,
                                      const std::string& name,
                                      const StateDict& dict,
                                      at::IntArrayRef sizes,
                                      at::TensorOptions like) {
  c10::NoGradGuard no_grad;
  at::Tensor value = at::empty(sizes, like.requires_grad(false));
  if (model.communicator().rank() == kWriter) value.copy_(dict[name]);
  if (value.numel() > 0) {
    FSDP_RETURN_IF_ERROR(comm::BroadcastTensor(
        model.communicator(), value.view({-1}).view(at::kByte), kWriter, name,
        DeadlineOf(model)));
  }
  return value;
}

// How many elements a sparse one has is known to rank 0 only.
absl::Status CheckNoneIsSparse(const NamedValues& values) {
  for (const NamedValues::Other& other : values.others) {
    if (other.tensor.layout() == c10::kStrided) continue;
    return absl::UnimplementedError(absl::StrCat(
        "buffer ", other.name,
        " is sparse, and LoadOptions::rank0_only sends dense ones only: pass "
        "the state dict on all ranks"));
  }
  return absl::OkStatus();
}

// Rank 0 has checked its dict; values travel one after the other.
absl::Status LoadFromWriter(ShardedModel& model, const NamedValues& values,
                            const StateDict& dict) {
  FSDP_ASSIGN_OR_RETURN(const std::set<std::string> names,
                        NamesOfWriter(model, dict));
  std::set<Place> done;
  for (const NamedValues::Parameter& parameter : values.parameters) {
    const FlatParameter& flat = *parameter.place.flat;
    const int i = parameter.place.index;
    if (names.count(parameter.name) == 0 || !done.insert({&flat, i}).second) {
      continue;
    }
    FSDP_ASSIGN_OR_RETURN(
        const at::Tensor value,
        FromWriter(model, parameter.name, dict,
                   flat.layout().parameter(i).sizes, flat.shard().options()));
    TakeOwnRange(flat, i, value);
  }
  for (const NamedValues::Other& other : values.others) {
    if (names.count(other.name) == 0) continue;
    FSDP_ASSIGN_OR_RETURN(
        const at::Tensor value,
        FromWriter(model, other.name, dict, other.tensor.sizes(),
                   other.tensor.options().dtype(other.original)));
    CopyInto(other.tensor, value);
  }
  return absl::OkStatus();
}

absl::StatusOr<StateDict> GatherFull(ShardedModel& model,
                                     const torch::nn::Module& module,
                                     const StateDictOptions& options) {
  const bool keeps =
      !options.rank0_only || model.communicator().rank() == kWriter;
  std::map<Place, at::Tensor> gathered;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      FSDP_ASSIGN_OR_RETURN(
          const at::Tensor whole,
          GatherShards(model, unit, flat->shard(), model.unit_name(unit)));
      for (int i = 0; keeps && i < flat->num_parameters(); ++i) {
        gathered[{flat.get(), i}] = CopyOf(
            flat->ViewOf(whole, i), flat->dtype(), options.offload_to_cpu);
      }
    }
  }
  StateDict dict;
  if (!keeps) return dict;
  const NamedValues values = ReadNamedValues(model, module);
  for (const NamedValues::Parameter& parameter : values.parameters) {
    dict.insert(parameter.name,
                gathered[{parameter.place.flat, parameter.place.index}]);
  }
  AddOthers(values, options.offload_to_cpu, dict);
  return dict;
}

absl::Status LoadFull(ShardedModel& model, const torch::nn::Module& module,
                      const StateDict& dict, const LoadOptions& options) {
  FSDP_RETURN_IF_ERROR(comm::CheckSame(
      model.communicator(), absl::StrCat("rank0_only ", options.rank0_only),
      "the options of LoadStateDict()", DeadlineOf(model)));
  const NamedValues values = ReadNamedValues(model, module);
  if (options.rank0_only) FSDP_RETURN_IF_ERROR(CheckNoneIsSparse(values));
  const bool has_dict =
      !options.rank0_only || model.communicator().rank() == kWriter;
  absl::StatusOr<LoadPlan> plan =
      has_dict ? PlanLoad(values, dict, options.strict) : LoadPlan();
  FSDP_RETURN_IF_ERROR(comm::Agree(model.communicator(), plan.status(),
                                   "loading a state dict", DeadlineOf(model)));
  if (options.rank0_only) return LoadFromWriter(model, values, dict);
  Apply(*plan);
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
  return InWholeAccess(model, "LoadStateDict()",
                       [&] { return LoadFull(model, module, dict, options); });
}

}  // namespace fsdp
