#include "fsdp/state/whole_access.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "flat_param/layout.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp {

absl::Time DeadlineOf(const ShardedModel& model) {
  return absl::Now() + model.timeout();
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

WholeAccess::WholeAccess(WholeAccess&& other) noexcept : model_(other.model_) {
  other.model_ = nullptr;
}

WholeAccess::~WholeAccess() {
  if (model_ != nullptr) model_->EndWholeAccess();
}

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

LentValues::LentValues(const at::Tensor& values, const std::string& until)
    : storage_(static_cast<int64_t>(values.nbytes()), values.device(),
               absl::StrCat("these are parameters or gradients of a sharded "
                            "model as they were whole, and ",
                            until, " is over: clone what has to outlive it")) {
  const NormalMode normal;
  storage_.Fill(values.mutable_data_ptr());
  tensor_ = TensorOver(storage_.storage(), 0, {values.numel()}, {1},
                       values.scalar_type());
}

}  // namespace fsdp
