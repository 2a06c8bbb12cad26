#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "comm/agreement.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/named_values.h"
#include "fsdp/state/state_dict.h"
#include "fsdp/state/state_dict_load.h"
#include "fsdp/state/whole_access.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::Slice;

using PiecesByName = std::map<std::string, std::vector<const ParameterPiece*>>;

// Empty: the piece is one of such a parameter.
std::string DifferenceOf(const ParameterPiece& piece,
                         const flat_param::ParameterSpec& spec,
                         c10::ScalarType dtype) {
  if (piece.sizes == spec.sizes && piece.strides == spec.strides) {
    return DtypeDifference(piece.values.scalar_type(), dtype);
  }
  return absl::StrCat("shape ", SizesText(piece.sizes), " with strides ",
                      SizesText(piece.strides), " instead of ",
                      SizesText(spec.sizes), " with ", SizesText(spec.strides));
}

// Replacements for this rank's shards, in the order of flats.
absl::StatusOr<std::vector<at::Tensor>> ShardsFromPieces(
    const ShardedModel& model, const PiecesByName& by_name) {
  std::vector<std::string> differences;
  std::vector<at::Tensor> shards;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      FSDP_ASSIGN_OR_RETURN(const Resident resident,
                            Resident::Of(flat->shard(), Use::kRead));
      at::Tensor& shard = shards.emplace_back(flat->shard().detach().clone());
      for (int i = 0; i < flat->num_parameters(); ++i) {
        const flat_param::ParameterSpec& spec = flat->layout().parameter(i);
        const auto pieces = by_name.find(spec.name);
        if (pieces == by_name.end()) {
          differences.push_back("missing: " + spec.name);
          continue;
        }
        for (const ParameterPiece* piece : pieces->second) {
          const std::string difference =
              DifferenceOf(*piece, spec, flat->dtype());
          if (difference.empty()) continue;
          differences.push_back(absl::StrCat(spec.name, ": ", difference));
          break;
        }
        const Slice slice = flat->layout().InShard(i, flat->rank());
        const absl::Status copied = CopyFromPieces(
            pieces->second, flat->layout().InParameter(i, flat->rank()).begin,
            shard.narrow(0, slice.begin, slice.numel()));
        if (copied.ok()) continue;
        differences.push_back(absl::StrCat(spec.name, ": ", copied.message()));
      }
    }
  }
  FSDP_RETURN_IF_ERROR(Differ("the sharded state dict", differences));
  return shards;
}

}  // namespace

absl::StatusOr<ShardedStateDict> MakeShardedStateDict(
    ShardedModel& model, const torch::nn::Module& module) {
  return InWholeAccess(
      model, "MakeShardedStateDict()",
      [&]() -> absl::StatusOr<ShardedStateDict> {
        ShardedStateDict dict;
        for (int unit = 0; unit < model.num_units(); ++unit) {
          for (const auto& flat : model.flats(unit)) {
            const Resident resident =
                ValueOrThrow(Resident::Of(flat->shard(), Use::kRead));
            for (int i = 0; i < flat->num_parameters(); ++i) {
              const flat_param::ParameterSpec& spec =
                  flat->layout().parameter(i);
              dict.parameters.push_back(
                  {spec.name, spec.sizes, spec.strides,
                   flat->layout().InParameter(i, flat->rank()).begin,
                   flat->ShardSlice(i).detach().clone()});
            }
          }
        }
        AddOthers(ReadNamedValues(model, module), /*to_cpu=*/false,
                  dict.others);
        return dict;
      },
      /*reads_values=*/true);
}

absl::Status LoadShardedStateDict(ShardedModel& model,
                                  const torch::nn::Module& module,
                                  absl::Span<const ParameterPiece> pieces,
                                  const StateDict& others) {
  return InWholeAccess(model, "LoadShardedStateDict()", [&]() -> absl::Status {
    PiecesByName by_name;
    for (const ParameterPiece& piece : pieces) {
      by_name[piece.name].push_back(&piece);
    }
    absl::StatusOr<std::vector<at::Tensor>> shards =
        ShardsFromPieces(model, by_name);
    NamedValues values = ReadNamedValues(model, module);
    values.parameters.clear();
    absl::StatusOr<LoadPlan> plan = PlanLoad(values, others, /*strict=*/true);
    FSDP_RETURN_IF_ERROR(comm::Agree(
        model.communicator(), shards.ok() ? plan.status() : shards.status(),
        "loading a sharded state dict", DeadlineOf(model)));
    OverwriteShards(model, *shards);
    Apply(*plan);
    return absl::OkStatus();
  });
}

}  // namespace fsdp
