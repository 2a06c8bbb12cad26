#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run_values.h"
#include "comm/agreement.h"
#include "comm/launcher/launch_options.h"
#include "fsdp/optim/shard_gradients.h"

namespace fsdp::checkpoint {
namespace {

// Looks through the models of all ranks, and reads nothing else of the run.
absl::StatusOr<NotFinite> FindIn(const TrainingRun& run,
                                 comm::Communicator* ranks,
                                 const std::string& label) {
  FSDP_ASSIGN_OR_RETURN(const RunValues values,
                        RunValues::ReadModel(run.model, "RunGuard"));
  return FindNotFinite(ranks, values.model().parameters(), label);
}

std::string StepName(int64_t step) { return absl::StrCat("step ", step); }

}  // namespace

std::vector<std::string> NoteFlags(
    const std::map<std::string, std::string>& flags, int64_t done,
    int64_t steps, TrainingRun* run) {
  std::vector<std::string> changed;
  for (const auto& [flag, value] : flags) {
    std::string& noted = run->entries.try_emplace(flag, value).first->second;
    if (noted != value) {
      changed.push_back(absl::StrCat(flag, "=", value,
                                     ": the checkpoint is of a run with ", flag,
                                     "=", noted));
    }
    noted = value;
  }
  if (done >= steps) {
    changed.push_back(absl::StrCat("nothing to train: the checkpoint has step ",
                                   done, " of ", steps));
  }
  return changed;
}

RunGuard::RunGuard(std::shared_ptr<comm::Communicator> ranks,
                   Checkpointer* checkpoints, TrainingRun* run,
                   const RunGuardOptions& options)
    : ranks_(std::move(ranks)),
      checkpoints_(checkpoints),
      run_(*run),
      options_(options) {}

absl::StatusOr<bool> RunGuard::MayStep(int64_t step, double loss,
                                       double grad_norm) {
  FSDP_RETURN_IF_ERROR(Exchange(step, loss));
  // The sum of finite losses may not be finite; that is an error, too.
  if (std::isfinite(mean_loss_) && std::isfinite(grad_norm)) {
    skipped_ = 0;
    return true;
  }
  const absl::Status error = NotFiniteError(step, grad_norm);
  if (!comm::IsAgreed(error) || skipped_ >= options_.max_skipped) return error;
  ++skipped_;
  if (ranks_ == nullptr || ranks_->rank() == 0) {
    TORCH_WARN(std::string(error.message()), " The step is left out, ",
               skipped_, " of at most ", options_.max_skipped, " in a row.");
  }
  return false;
}

absl::Status RunGuard::EndStep(int64_t step, bool is_last) {
  if (!has_exchanged_) FSDP_RETURN_IF_ERROR(Exchange(step, /*loss=*/0));
  has_exchanged_ = false;
  const bool is_stopped = signal_ != 0 && !is_last;
  const bool is_due =
      options_.save_every > 0 && step % options_.save_every == 0;
  bool saves = checkpoints_ != nullptr && (is_last || is_stopped || is_due);
  if (saves && options_.before_save) saves = options_.before_save(step);
  if (saves) FSDP_RETURN_IF_ERROR(Save(step, is_last || is_stopped));
  if (!is_stopped) return absl::OkStatus();
  return comm::AsAgreed(comm::StoppedError(
      signal_,
      absl::StrCat(
          "stopped by ", comm::SignalText(signal_), " after ", StepName(step),
          saved_ == step ? absl::StrCat(", of which there is a checkpoint in ",
                                        checkpoints_->folder())
                         : ", of which nothing was saved")));
}

// Exchanges the ranks' losses, and whether one of them has been told to stop.
absl::Status RunGuard::Exchange(int64_t step, double loss) {
  has_exchanged_ = true;
  int signal = 0;
  if (options_.signal) {
    signal = options_.signal();
  } else if (const auto* stop = comm::StopRequest::Current()) {
    signal = stop->signal();
  }
  // Each rank fills its own two numbers of the sum.
  const int ranks = ranks_ == nullptr ? 1 : ranks_->world_size();
  const at::Tensor all = at::zeros({2 * int64_t{ranks}}, at::kDouble);
  const int64_t rank = ranks_ == nullptr ? 0 : ranks_->rank();
  auto* const mine = all.mutable_data_ptr<double>() + 2 * rank;
  mine[0] = loss;
  mine[1] = signal;
  if (ranks_ != nullptr) {
    FSDP_ASSIGN_OR_RETURN(
        auto work,
        ranks_->AllReduce(all, comm::ReduceOp::kSum, StepName(step)));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + ranks_->default_timeout()));
  }
  const auto* const values = all.const_data_ptr<double>();
  losses_.clear();
  double sum = 0;
  for (int64_t i = 0; i < all.numel(); i += 2) {
    losses_.push_back(values[i]);
    sum += values[i];
    if (signal_ == 0) signal_ = static_cast<int>(values[i + 1]);
  }
  mean_loss_ = sum / static_cast<double>(losses_.size());
  return absl::OkStatus();
}

absl::Status RunGuard::NotFiniteError(int64_t step, double grad_norm) {
  std::string text = absl::StrCat(StepName(step), ": ");
  size_t rank = 0;
  while (rank < losses_.size() && std::isfinite(losses_[rank])) ++rank;
  if (rank < losses_.size()) {
    absl::StrAppend(&text, "the loss of rank ", rank, " is ", losses_[rank]);
  } else if (!std::isfinite(mean_loss_)) {
    absl::StrAppend(&text, "the mean of the losses is ", mean_loss_);
  } else {
    absl::StrAppend(&text, "the norm of the gradients is ", grad_norm);
  }
  FSDP_ASSIGN_OR_RETURN(const NotFinite first,
                        FindIn(run_, ranks_.get(), StepName(step)));
  if (!first.value.empty()) {
    absl::StrAppend(&text, "; ", first.value,
                    " is the first parameter with a value that is not finite");
  } else if (!first.gradient.empty()) {
    absl::StrAppend(&text, "; all parameters are finite, and ", first.gradient,
                    " is the first one with a gradient that is not");
  } else {
    absl::StrAppend(&text, "; all parameters and gradients are finite");
  }
  absl::StrAppend(&text, ". This step is not in a checkpoint.");
  return comm::AsAgreed(absl::FailedPreconditionError(text));
}

absl::Status RunGuard::Save(int64_t step, bool waits) {
  FSDP_ASSIGN_OR_RETURN(
      const NotFinite first,
      FindIn(run_, ranks_.get(), absl::StrCat("saving ", StepName(step))));
  if (!first.value.empty()) {
    return comm::AsAgreed(absl::FailedPreconditionError(absl::StrCat(
        StepName(step), ": ", first.value,
        " is the first parameter with a value that is not finite, so this step "
        "is not saved; the checkpoints that there are stay. If it has become "
        "so in training, go on from one of them with a lower learning rate or "
        "other data. If it was so from the start, which no loss shows for a "
        "row that is not used, mend the model's files.")));
  }
  FSDP_RETURN_IF_ERROR(options_.save_async && !waits
                           ? checkpoints_->SaveAsync(step, run_)
                           : checkpoints_->Save(step, run_));
  saved_ = step;
  return absl::OkStatus();
}

}  // namespace fsdp::checkpoint
