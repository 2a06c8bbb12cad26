#include "fsdp/state/model_values.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/state/named_values.h"
#include "fsdp/state/whole_access.h"

namespace fsdp {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::ParameterSpec;
using ::fsdp::flat_param::Slice;

ValueRange RangeOf(const ShardedModel& model, std::string name,
                   const ShardedValue& place) {
  const FlatParameter& flat = *place.flat;
  const ParameterSpec& spec = flat.layout().parameter(place.index);
  ValueRange range{std::move(name),
                   spec.sizes,
                   spec.strides,
                   flat.layout().InParameter(place.index, flat.rank()).begin,
                   flat.ShardSlice(place.index),
                   place.flat,
                   place.index,
                   place.unit};
  const comm::Communicator* const replicas = model.replica_group(place.unit);
  if (replicas != nullptr) {
    range.replica = replicas->rank();
    range.replicas = replicas->world_size();
  }
  return range;
}

ParameterSpec SpecOf(const ValueRange& range) {
  return {range.name, range.sizes, range.strides};
}

// This rank's part of `whole`, among all that have the unit.
void TakeEvenPart(const ShardedModel& model, const at::Tensor& whole,
                  ValueRange& range) {
  const comm::Communicator& shards = model.shard_group(range.unit);
  const auto [begin, end] =
      EvenPart(whole.numel(), shards.rank(), shards.world_size());
  range.begin = begin;
  range.values = whole.reshape({-1}).narrow(0, begin, end - begin).clone();
  int64_t stride = 1;
  for (size_t d = range.sizes.size(); d-- > 0;) {
    range.strides[d] = stride;
    stride *= std::max<int64_t>(range.sizes[d], 1);
  }
}

// Ranges of one flat parameter and dtype, which are gathered together: by unit
// and first parameter, so in the same order on all ranks.
using Together = std::map<std::tuple<int, std::string, c10::ScalarType>,
                          std::vector<ValueRange*>>;

// This rank's shard, with what `ranges` have of it and zeros elsewhere.
absl::StatusOr<at::Tensor> ShardOf(const FlatParameter& flat,
                                   c10::ScalarType dtype,
                                   const std::vector<ValueRange*>& ranges) {
  at::Tensor shard =
      at::zeros({flat.layout().shard_numel()},
                at::TensorOptions().dtype(dtype).device(flat.device()));
  for (const ValueRange* range : ranges) {
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(range->values, Use::kRead));
    const Slice slice = flat.layout().InShard(range->index, flat.rank());
    shard.narrow(0, slice.begin, slice.numel()).copy_(range->values);
  }
  return shard;
}

}  // namespace

bool ValueRange::IsRowMajor() const {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 0) return true;
    if (sizes[d] != 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return true;
}

bool IsOfShardedModel(const at::Tensor& parameter) {
  return parameter.has_storage() && flat_param::IsGuarded(parameter.storage());
}

std::pair<int64_t, int64_t> EvenPart(int64_t count, int index, int parts) {
  const auto begin = [=](int64_t i) {
    return count / parts * i + std::min(count % parts, i);
  };
  return {begin(index), begin(index + 1)};
}

ModelValues ReadModelValues(ShardedModel& model,
                            const torch::nn::Module& module) {
  const NamedValues named = ReadNamedValues(model, module);
  ModelValues values;
  std::map<std::pair<const FlatParameter*, int>, std::string> first_names;
  for (const NamedValues::Parameter& parameter : named.parameters) {
    const auto [first, is_new] = first_names.try_emplace(
        {parameter.place.flat, parameter.place.index}, parameter.name);
    if (is_new) {
      values.parameters.push_back(
          RangeOf(model, parameter.name, parameter.place));
    } else {
      values.aliases[parameter.name] = first->second;
    }
  }
  for (const NamedValues::Other& other : named.others) {
    values.others.push_back(
        {other.name, other.tensor, other.original, other.is_buffer});
  }
  return values;
}

absl::Status MakeRowMajor(ShardedModel& model,
                          std::vector<ValueRange>& ranges) {
  Together turned;
  for (ValueRange& range : ranges) {
    if (range.IsRowMajor()) continue;
    turned[{range.unit, range.flat->parameter(0).name,
            range.values.scalar_type()}]
        .push_back(&range);
  }
  const NormalMode normal;
  const c10::NoGradGuard no_grad;
  for (const auto& [place, of_flat] : turned) {
    const auto& [unit, name, dtype] = place;
    const FlatParameter& flat = *of_flat.front()->flat;
    FSDP_ASSIGN_OR_RETURN(const at::Tensor shard,
                          ShardOf(flat, dtype, of_flat));
    FSDP_ASSIGN_OR_RETURN(const at::Tensor whole,
                          GatherShards(model, unit, shard, name));
    for (ValueRange* range : of_flat) {
      TakeEvenPart(model, flat.ViewOf(whole, range->index), *range);
    }
  }
  return absl::OkStatus();
}

absl::Status TakeOwnPart(const at::Tensor& whole, const ValueRange& range) {
  if (range.values.numel() == 0) return absl::OkStatus();
  const NormalMode normal;
  const c10::NoGradGuard no_grad;
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(range.values, Use::kUpdate));
  return TorchToStatus(range.name, [&] {
    at::Tensor target = range.values.detach();
    target.copy_(flat_param::StorageOrderOf(whole, SpecOf(range))
                     .narrow(0, range.begin, range.values.numel()));
  });
}

absl::Status CopyFromPieces(absl::Span<const ParameterPiece* const> pieces,
                            int64_t begin, const at::Tensor& target) {
  std::vector<const ParameterPiece*> sorted(pieces.begin(), pieces.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const ParameterPiece* a, const ParameterPiece* b) {
              return a->begin < b->begin;
            });
  const int64_t end = begin + target.numel();
  int64_t covered = begin;
  for (const ParameterPiece* piece : sorted) {
    if (piece->begin > covered) break;
    covered = std::max(covered, piece->begin + piece->values.numel());
  }
  if (covered < end) {
    return absl::NotFoundError(absl::StrCat("no piece has element ", covered));
  }
  c10::NoGradGuard no_grad;
  for (const ParameterPiece* piece : sorted) {
    const int64_t from = std::max(begin, piece->begin);
    const int64_t to = std::min(end, piece->begin + piece->values.numel());
    if (from >= to) continue;
    target.narrow(0, from - begin, to - from)
        .copy_(piece->values.narrow(0, from - piece->begin, to - from));
  }
  return absl::OkStatus();
}

}  // namespace fsdp
