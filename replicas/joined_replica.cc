#include "replicas/joined_replica.h"

#include <ATen/core/Tensor.h>
#include <torch/utils.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "checkpoint/run/run_values.h"
#include "comm/communicator.h"
#include "ranges/tensor_range.h"

namespace fsdp::replicas {
namespace {

// Random states belong to one rank: a rank that begins with the state of
// another one seeds itself anew, with a seed that the history determines.
void SeedAnew(int64_t epoch, int replica, int rank) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;
  uint64_t seed = static_cast<uint64_t>(epoch);
  for (const int part : {replica, rank}) {
    seed = (seed ^ (seed >> 29)) * kFactor + static_cast<uint64_t>(part);
  }
  torch::manual_seed(seed);
}

}  // namespace

absl::StatusOr<std::optional<Roster>> JoinedReplica::BeginStep() {
  if (roster_.number < 0) {
    FSDP_ASSIGN_OR_RETURN(roster_, log_.Enter(options_.first_step));
  }
  if (roster_.step >= options_.steps) return std::nullopt;
  Roster begin = roster_;
  const bool is_new = IsNew();
  FSDP_RETURN_IF_ERROR(Settle());
  // The seed depends on the epoch with which the step begins: a replay knows of
  // no losses before FinishStep(), and has to draw the same numbers.
  if (is_new && run_.random_state) {
    SeedAnew(begin.epoch, options_.self.replica, options_.rank);
  }
  return begin;
}

absl::Status JoinedReplica::Settle() {
  while (settled_epoch_ != roster_.epoch) {
    const absl::Status status = ConnectAll();
    if (status.ok()) {
      settled_epoch_ = roster_.epoch;
    } else {
      FSDP_RETURN_IF_ERROR(AwaitLoss(status));
    }
  }
  return absl::OkStatus();
}

absl::Status JoinedReplica::ConnectAll() {
  means_ = nullptr;  // it belongs to the column before
  FSDP_RETURN_IF_ERROR(column_.Connect(
      roster_.epoch, Index(), static_cast<int>(roster_.members.size())));
  FSDP_RETURN_IF_ERROR(HandOverToNew());
  FSDP_ASSIGN_OR_RETURN(const checkpoint::RunValues values,
                        checkpoint::RunValues::Read(run_, "Replicas"));
  std::vector<at::Tensor> leaves;
  for (const TensorRange& leaf : values.model().parameters()) {
    leaves.push_back(leaf.values);
  }
  means_ = std::make_unique<GradientMeans>(column_.ranks(), std::move(leaves));
  return absl::OkStatus();
}

absl::Status JoinedReplica::HandOverToNew() {
  const bool gives = Donor(roster_)->id == options_.self;
  int index = 0;  // of this replica among the receivers; 0 is the donor
  int size = 1;
  for (const Member& member : roster_.members) {
    if (!member.is_new) continue;
    if (member.id == options_.self) index = size;
    ++size;
  }
  if (size == 1 || (!gives && index == 0)) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<comm::Communicator> part,
                        column_.ConnectPart(index, size));
  return HandOver(*part, /*root=*/0, run_, absl::Now() + options_.timeout);
}

absl::Status JoinedReplica::AwaitLoss(const absl::Status& failure) {
  column_.Abort(failure);
  // This replica does not fit the others, who go on without it.
  if (IsNew() && absl::IsInvalidArgument(failure)) return failure;
  if (options_.stop_requested && options_.stop_requested()) return failure;
  // The donor waits longer than the others: if nobody is to blame, one replica
  // goes on, and it has to be one that has the state.
  const bool is_last = Donor(roster_)->id == options_.self;
  const absl::Duration patience = options_.patience * (is_last ? 2 : 1);
  absl::StatusOr<Roster> next = log_.AwaitNext(roster_, absl::Now() + patience);
  if (absl::IsDeadlineExceeded(next.status())) {
    return Annotate(failure,
                    absl::StrCat("between replicas, none of which is lost "
                                 "after ",
                                 absl::FormatDuration(patience)));
  }
  FSDP_RETURN_IF_ERROR(next.status());
  // In a replay nobody may have been lost.
  if (next->cause != Cause::kLost) return failure;
  roster_ = *std::move(next);
  return absl::OkStatus();
}

absl::Status JoinedReplica::FinishStep() {
  for (;;) {
    FSDP_ASSIGN_OR_RETURN(roster_, log_.SkipLosses(roster_));
    FSDP_RETURN_IF_ERROR(Settle());
    const absl::Status status = means_->Sum(absl::Now() + options_.timeout);
    if (!status.ok()) {
      FSDP_RETURN_IF_ERROR(AwaitLoss(status));
      continue;
    }
    FSDP_RETURN_IF_ERROR(log_.VoteFor(roster_));
    FSDP_ASSIGN_OR_RETURN(
        Roster next, log_.AwaitNext(roster_, absl::Now() + options_.timeout));
    std::swap(roster_, next);
    if (roster_.cause != Cause::kFinished) continue;
    finished_ = std::move(next);
    return means_->Apply();
  }
}

}  // namespace fsdp::replicas
