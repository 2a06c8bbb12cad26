#include "fsdp/state/model_values.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <set>
#include <utility>

#include "absl/time/clock.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp {

absl::Time DeadlineOf(const ShardedModel& model) {
  return absl::Now() + model.timeout();
}

absl::Status CheckHasValues(const at::Tensor& tensor) {
  if (tensor.is_meta()) {
    return absl::InvalidArgumentError("a tensor on meta has no values");
  }
  if (!tensor.has_storage() || tensor.numel() == 0) return absl::OkStatus();
  const absl::Status read =
      TorchToStatus("its values", [&] { tensor.const_data_ptr(); });
  return read.ok() ? read : absl::InvalidArgumentError(read.message());
}

absl::StatusOr<WholeAccess> WholeAccess::Begin(ShardedModel& model,
                                               absl::string_view what,
                                               bool reads_values) {
  const absl::Status mine = model.BeginWholeAccess(what, reads_values);
  absl::Status all =
      comm::Agree(model.communicator(), mine, what, DeadlineOf(model));
  if (all.ok()) return WholeAccess(&model);
  if (mine.ok()) model.EndWholeAccess();
  return all;
}

absl::StatusOr<WholeAccess> WholeAccess::BeginAlone(ShardedModel& model,
                                                    absl::string_view what) {
  FSDP_RETURN_IF_ERROR(model.BeginWholeAccess(what));
  return WholeAccess(&model);
}

namespace {

absl::StatusOr<at::Tensor> Gather(const ShardedModel& model, int unit,
                                  const at::Tensor& shard) {
  const absl::Time deadline = DeadlineOf(model);
  const NormalMode normal;
  comm::Communicator& group = model.shard_group(unit);
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(shard, Use::kRead));
  if (group.world_size() == 1) return shard.detach().clone();
  at::Tensor whole = at::empty({shard.numel() * group.world_size()},
                               shard.options().requires_grad(false));
  FSDP_ASSIGN_OR_RETURN(
      std::unique_ptr<comm::Work> work,
      group.AllGather(whole, shard.detach(), model.unit_name(unit)));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  return whole;
}

using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::Slice;

// A range, by its index, and its parameter's index in a flat parameter.
using OfFlat = std::vector<std::pair<size_t, int>>;

// This rank's shard, with what `ranges` have of it and zeros elsewhere.
absl::StatusOr<at::Tensor> ShardOf(const FlatParameter& flat,
                                   c10::ScalarType dtype,
                                   absl::Span<const TensorRange> ranges,
                                   const OfFlat& of_flat) {
  at::Tensor shard =
      at::zeros({flat.layout().shard_numel()},
                at::TensorOptions().dtype(dtype).device(flat.device()));
  for (const auto& [range, index] : of_flat) {
    const at::Tensor& values = ranges[range].values;
    FSDP_ASSIGN_OR_RETURN(const Resident resident,
                          Resident::Of(values, Use::kRead));
    const Slice slice = flat.layout().InShard(index, flat.rank());
    shard.narrow(0, slice.begin, slice.numel()).copy_(values);
  }
  return shard;
}

}  // namespace

absl::StatusOr<at::Tensor> GatherShards(const ShardedModel& model, int unit,
                                        const at::Tensor& shard) {
  absl::StatusOr<at::Tensor> whole = Gather(model, unit, shard);
  if (!whole.ok()) model.Abort(whole.status());
  return whole;
}

at::Tensor ShardOfGradients(const flat_param::FlatParameter& flat) {
  const NormalMode normal;
  at::Tensor gradients = at::zeros_like(flat.shard());
  for (int i = 0; i < flat.num_parameters(); ++i) {
    const at::Tensor& gradient = flat.ShardSlice(i).grad();
    if (!gradient.defined()) continue;
    const Resident resident = ValueOrThrow(Resident::Of(gradient, Use::kRead));
    const flat_param::Slice slice = flat.layout().InShard(i, flat.rank());
    gradients.narrow(0, slice.begin, slice.numel()).copy_(gradient);
  }
  return gradients;
}

bool IsOfShardedModel(const at::Tensor& parameter) {
  return parameter.has_storage() && flat_param::IsGuarded(parameter.storage());
}

ModelValues ReadModelValues(const ShardedModel& model,
                            const torch::nn::Module& module) {
  // The model's ranges, in their order, by the module's tensors.
  std::map<const void*, const TensorRange*> ranges;
  const TensorRange* next = model.Ranges().data();
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      for (int i = 0; i < flat->num_parameters(); ++i, ++next) {
        for (const at::Tensor& tensor : flat->parameter(i).tensors) {
          ranges[tensor.unsafeGetTensorImpl()] = next;
        }
      }
    }
  }
  std::map<const void*, c10::ScalarType> originals;
  for (const CastBuffer& buffer : model.precision().buffers()) {
    originals[buffer.tensor.unsafeGetTensorImpl()] = buffer.original;
  }
  ModelValues values;
  std::vector<TensorRange> others;
  std::set<std::string> seen;
  for (const auto& item : module.named_parameters()) {
    const auto range = ranges.find(item.value().unsafeGetTensorImpl());
    if (range == ranges.end()) {
      others.push_back(WholeRange(item.key(), item.value()));
      continue;
    }
    const std::string& name = range->second->name;
    if (item.key() != name) values.aliases[item.key()] = name;
    if (seen.insert(name).second) values.all.push_back(*range->second);
  }
  values.num_ranges = values.all.size();
  values.num_parameters = values.num_ranges + others.size();
  for (const auto& item : module.named_buffers()) {
    if (!item.value().defined()) continue;
    TensorRange& buffer =
        others.emplace_back(WholeRange(item.key(), item.value()));
    const auto original = originals.find(item.value().unsafeGetTensorImpl());
    if (original != originals.end()) buffer.dtype = original->second;
  }
  values.all.insert(values.all.end(), others.begin(), others.end());
  return values;
}

absl::Status ForEachWhole(
    const ShardedModel& model, absl::Span<const TensorRange> ranges,
    absl::FunctionRef<void(size_t range, const at::Tensor& whole)> visit) {
  if (ranges.empty()) return absl::OkStatus();
  std::map<std::string, size_t> by_name;
  for (size_t i = 0; i < ranges.size(); ++i) by_name[ranges[i].name] = i;
  const NormalMode normal;
  const c10::NoGradGuard no_grad;
  for (int unit = 0; unit < model.num_units(); ++unit) {
    for (const auto& flat : model.flats(unit)) {
      // Those of one dtype are gathered together.
      std::map<c10::ScalarType, OfFlat> by_dtype;
      for (int i = 0; i < flat->num_parameters(); ++i) {
        const auto range = by_name.find(flat->parameter(i).name);
        if (range == by_name.end()) continue;
        by_dtype[ranges[range->second].values.scalar_type()].emplace_back(
            range->second, i);
      }
      for (const auto& [dtype, of_flat] : by_dtype) {
        const absl::StatusOr<at::Tensor> shard =
            ShardOf(*flat, dtype, ranges, of_flat);
        // The other ranks wait in the gather.
        if (!shard.ok()) model.Abort(shard.status());
        FSDP_RETURN_IF_ERROR(shard.status());
        FSDP_ASSIGN_OR_RETURN(const at::Tensor whole,
                              GatherShards(model, unit, *shard));
        for (const auto& [range, index] : of_flat) {
          visit(range, flat->ViewOf(whole, index));
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status MakeRowMajor(const ShardedModel& model,
                          std::vector<TensorRange>& ranges) {
  std::vector<TensorRange> turned;
  std::vector<TensorRange*> places;
  for (TensorRange& range : ranges) {
    if (range.is_whole || range.IsRowMajor()) continue;
    turned.push_back(range);
    places.push_back(&range);
  }
  return ForEachWhole(model, turned, [&](size_t i, const at::Tensor& whole) {
    TensorRange& range = *places[i];
    const comm::Communicator& shards = model.shard_group(range.unit);
    const auto [begin, end] =
        EvenPart(whole.numel(), shards.rank(), shards.world_size());
    range.begin = begin;
    range.values = whole.reshape({-1}).narrow(0, begin, end - begin).clone();
    range.strides = RowMajorStrides(range.sizes);
  });
}

absl::Status TakeOwnPart(const at::Tensor& whole, const TensorRange& range) {
  if (range.values.numel() == 0) return absl::OkStatus();
  const NormalMode normal;
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(range.values, Use::kUpdate));
  const TensorRange piece = WholeRange(range.name, whole);
  return TorchToStatus(range.name, [&] { CopyFromPieces({&piece}, range); });
}

}  // namespace fsdp
