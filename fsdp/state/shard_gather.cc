#include "fsdp/state/shard_gather.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/normal_mode.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "comm/communicator.h"
#include "comm/work.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/state/whole_access.h"

namespace fsdp {

namespace {

absl::StatusOr<at::Tensor> Gather(comm::Communicator& group,
                                  const at::Tensor& shard,
                                  absl::string_view label,
                                  absl::Time deadline) {
  const NormalMode normal;
  FSDP_ASSIGN_OR_RETURN(const Resident resident,
                        Resident::Of(shard, Use::kRead));
  if (group.world_size() == 1) return shard.detach().clone();
  at::Tensor whole = at::empty({shard.numel() * group.world_size()},
                               shard.options().requires_grad(false));
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<comm::Work> work,
                        group.AllGather(whole, shard.detach(), label));
  FSDP_RETURN_IF_ERROR(work->Wait(deadline));
  return whole;
}

}  // namespace

absl::StatusOr<at::Tensor> GatherShards(const ShardedModel& model, int unit,
                                        const at::Tensor& shard,
                                        absl::string_view label) {
  absl::StatusOr<at::Tensor> whole =
      Gather(model.shard_group(unit), shard, label, DeadlineOf(model));
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

}  // namespace fsdp
