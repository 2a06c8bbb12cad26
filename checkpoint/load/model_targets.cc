#include "checkpoint/load/model_targets.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/state/model_values.h"

namespace fsdp::checkpoint {
namespace {

// Fills a tensor that is whole on this rank.
void FillWhole(const at::Tensor& tensor, bool has_values, LoadTarget& target) {
  const bool is_plain =
      tensor.layout() == c10::kStrided && tensor.is_contiguous() && has_values;
  if (is_plain) target.values = tensor.detach().view({-1});
  target.take_whole = [tensor](const at::Tensor& whole) {
    return TorchToStatus("filling a tensor", [&] {
      const c10::NoGradGuard no_grad;
      CopyInto(tensor.detach(), whole);
    });
  };
}

LoadTarget TargetOf(const ValueRange& range, bool is_sharded, bool has_values) {
  LoadTarget target;
  target.name = range.name;
  target.sizes = range.sizes;
  target.unit = range.unit;
  target.dtype = range.values.scalar_type();
  if (!is_sharded) {
    FillWhole(range.values, has_values, target);
    return target;
  }
  target.begin = range.begin;
  if (range.IsRowMajor()) target.values = range.values;
  target.take_whole = [range](const at::Tensor& whole) {
    return TakeOwnPart(whole, range);
  };
  return target;
}

}  // namespace

std::vector<LoadTarget> TargetsOf(const RunValues& values) {
  std::vector<LoadTarget> targets;
  std::map<std::string, size_t> by_name;
  for (const ValueRange& range : values.model().parameters) {
    by_name[range.name] = targets.size();
    targets.push_back(
        TargetOf(range, values.sharded() != nullptr, !range.values.is_meta()));
  }
  for (const auto& [alias, name] : values.model().aliases) {
    targets[by_name.at(name)].aliases.push_back(alias);
  }
  for (const WholeValue& other : values.model().others) {
    LoadTarget target;
    target.name = other.name;
    target.sizes = other.tensor.sizes().vec();
    target.dtype = other.file_dtype;
    FillWhole(other.tensor, !other.tensor.is_meta(), target);
    targets.push_back(std::move(target));
  }
  return targets;
}

Caching CachingFor(const RunValues& values, int world_size) {
  const std::vector<ValueRange>& parameters = values.model().parameters;
  const bool is_shared =
      values.sharded() == nullptr
          ? world_size > 1
          : std::any_of(parameters.begin(), parameters.end(),
                        [](const ValueRange& one) { return one.replicas > 1; });
  return is_shared ? Caching::kCached : Caching::kDirect;
}

absl::StatusOr<at::Tensor> MakeState(const RunValues& values, int leaf,
                                     c10::ScalarType dtype,
                                     c10::Device device) {
  at::Tensor state;
  FSDP_RETURN_IF_ERROR(TorchToStatus("making an optimizer's state", [&] {
    const NormalMode normal;
    // Of the parameter's sizes and strides, as the optimizer would make it.
    state = at::empty_like(values.leaves()[leaf].shard.detach(),
                           at::TensorOptions().dtype(dtype).device(device));
  }));
  return state;
}

LoadTarget StateTarget(const RunValues& values, int leaf,
                       const at::Tensor& state) {
  const std::vector<ValueRange>& parameters = values.model().parameters;
  if (static_cast<size_t>(leaf) >= parameters.size()) {
    const auto& named = values.leaves()[leaf];
    LoadTarget target;
    target.name = named.name;
    target.sizes = named.sizes;
    target.dtype = state.scalar_type();
    FillWhole(state, /*has_values=*/true, target);
    return target;
  }
  ValueRange range = parameters[leaf];
  range.values = state;
  LoadTarget target =
      TargetOf(range, values.sharded() != nullptr, /*has_values=*/true);
  for (const auto& [alias, name] : values.model().aliases) {
    if (name == range.name) target.aliases.push_back(alias);
  }
  return target;
}

}  // namespace fsdp::checkpoint
