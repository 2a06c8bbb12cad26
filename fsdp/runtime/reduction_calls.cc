#include "fsdp/runtime/reduction_calls.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "fsdp/runtime/placement.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {

ReductionCalls::ReductionCalls(RuntimeCommon& common, const RuntimeHooks& hooks)
    : common_(common), hooks_(hooks) {
  for (const RuntimeUnit& unit : common_.units()) {
    labels_.emplace_back(unit.flats.size());
  }
}

// Ranks that train others of the unit's parameters have another label, which
// groups compare, where segments may be as long.
const std::string& ReductionCalls::Label(int unit, size_t i,
                                         const GradientLayout& layout) {
  const std::vector<bool>& trained = layout.trained();
  const int count = layout.num_flags();
  const std::string& whole = common_.label(unit, i);
  if (count == static_cast<int>(trained.size())) return whole;
  std::string& label = labels_[unit][i][trained];
  if (!label.empty()) return label;
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const bool is_trained : trained) {
    hash = (hash ^ (is_trained ? 1 : 0)) * 0x100000001b3;
  }
  const auto& parameter = *common_.units()[unit].flats[i];
  label = absl::StrCat(
      whole, " (trains ", count, " of ", trained.size(), " parameters, ",
      absl::Hex(hash, absl::kZeroPad16), ", first ",
      parameter.parameter(layout.parameters().front()).name, ")");
  return label;
}

absl::StatusOr<ReductionCalls::ReduceScatter>
ReductionCalls::StartReduceScatter(int unit, size_t i,
                                   const GradientBuffer& gradients,
                                   const ReduceBuffer& buffer,
                                   ShardGradient* direct) {
  const std::string& label = Label(unit, i, *buffer.layout);
  common_.order().Add(ActionKind::kReduce, unit, label, buffer.layout->bytes(),
                      gradients.options().reduce_dtype);
  const at::Tensor own = gradients.OwnSegment(buffer);
  const at::Tensor whole = gradients.Whole(buffer);
  const Placement& placement = common_.placement(unit);
  ReduceScatter started;
  if (hooks_.reduce_scatter) {
    FSDP_ASSIGN_OR_RETURN(
        started.work, hooks_.reduce_scatter({common_.label(unit, i),
                                             *placement.shard, whole, own}));
    return started;
  }
  std::optional<ShardGradient::DirectTarget> target;
  if (direct != nullptr) {
    FSDP_ASSIGN_OR_RETURN(target, direct->StartDirect(buffer.layout));
  }
  if (target) {
    started.is_direct = true;
    FSDP_ASSIGN_OR_RETURN(started.work,
                          placement.traffic().ReduceScatterScaled(
                              target->out, whole, target->sum, label));
  } else {
    FSDP_ASSIGN_OR_RETURN(started.work,
                          placement.traffic().ReduceScatter(
                              own, whole, comm::ReduceOp::kSum, label));
  }
  return started;
}

absl::StatusOr<std::unique_ptr<comm::Work>> ReductionCalls::StartAllReduce(
    int unit, size_t i, const GradientBuffer& gradients,
    const ReduceBuffer& buffer) {
  comm::Communicator& group = *common_.placement(unit).replicate;
  const std::string& label = Label(unit, i, *buffer.layout);
  common_.order().Add(ActionKind::kReplicate, unit, label,
                      buffer.layout->bytes(), gradients.options().reduce_dtype);
  const at::Tensor own = gradients.OwnSegment(buffer);
  if (hooks_.all_reduce) {
    return hooks_.all_reduce({common_.label(unit, i), group, own});
  }
  return group.AllReduce(own, comm::ReduceOp::kSum, label);
}

}  // namespace fsdp
