#include "testing/gpt/trainer.h"

#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/trace/trace.h"
#include "testing/gpt/model.h"

namespace gpt {
namespace {

using ::fsdp::comm::Communicator;

// Losses on their way from the device to the host. A host that reads each loss
// at once makes the device wait for its next step; one that reads them a step
// late does not.
class LossQueue {
 public:
  // Starts to copy the loss of a step, one number, to the host.
  void Push(const at::Tensor& loss) {
    const c10::NoGradGuard no_grad;
    losses_.push_back(fsdp::CopyToHost(loss.detach().to(at::kDouble)));
  }

  size_t size() const { return losses_.size(); }

  // Waits until the device has computed the oldest loss, of which there is one,
  // and takes it. DeadlineExceeded: it has not; Internal: it has failed.
  absl::StatusOr<double> Pop(absl::Time deadline) {
    const fsdp::HostCopy loss = std::move(losses_.front());
    losses_.pop_front();
    bool is_there = false;
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus(
        "reading the loss", [&] { is_there = loss.is_there.Wait(deadline); }));
    if (is_there) return *loss.values.const_data_ptr<double>();
    return absl::DeadlineExceededError(
        "reading the loss: the device has not computed it");
  }

 private:
  std::deque<fsdp::HostCopy> losses_;
};

// Makes the activity record the optimizer's steps.
fsdp::FusedOptions Noted(const Communicator& communicator) {
  fsdp::FusedOptions options;
  options.activity = communicator.activity();
  return options;
}

// Runs forward and backward. Returns this rank's loss, which a device may not
// have computed yet. `replicas` may be null.
absl::StatusOr<at::Tensor> Gradients(const Batch& batch, TrainableModel& model,
                                     fsdp::Replicas* replicas) {
  at::Tensor loss;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("forward", [&] {
    loss = NextTokenLoss(model.Forward(batch.inputs), batch.targets);
  }));
  FSDP_RETURN_IF_ERROR(model.Backward(loss));
  if (replicas != nullptr) FSDP_RETURN_IF_ERROR(replicas->FinishStep());
  return loss.detach();
}

class Training {
 public:
  Training(const TrainOptions& options, const TrainerContext& context,
           TrainableModel& model, const std::shared_ptr<Communicator>& ranks)
      : options_(options),
        context_(context),
        model_(model),
        timeout_(ranks->default_timeout()),
        optimizer_(model.OptimizerParameters(),
                   torch::optim::AdamWOptions(kLearningRate), Noted(*ranks)),
        done_(model.offload() == nullptr ? 0 : model.offload()->step()),
        guard_(ranks, context.checkpoints, &run_, GuardOptions()) {
    run_.model = &model.module();
    run_.optimizer = &optimizer_;
  }

  absl::StatusOr<TrainingResult> Run(Batches& data) {
    FSDP_RETURN_IF_ERROR(Resume());
    FSDP_RETURN_IF_ERROR(Join());
    begun_ = done_;
    while (result_.stopped.ok()) {
      FSDP_ASSIGN_OR_RETURN(const bool is_over, BeginStep());
      if (is_over) break;
      if (begun_ > options_.warmup && !is_timed_) {
        is_timed_ = true;
        if (context_.on_timed_begin) context_.on_timed_begin();
      }
      FSDP_RETURN_IF_ERROR(Step(begun_, data));
      result_.stopped = guard_.EndStep(begun_, begun_ == last_step());
      if (!absl::IsCancelled(result_.stopped)) {
        FSDP_RETURN_IF_ERROR(result_.stopped);
      }
    }
    while (losses_.size() > 0) FSDP_RETURN_IF_ERROR(EndStep());
    if (context_.checkpoints != nullptr) {
      FSDP_RETURN_IF_ERROR(context_.checkpoints->Wait());
    }
    result_.last_step = done_;
    result_.finished = done_ >= last_step();
    return std::move(result_);
  }

 private:
  int64_t last_step() const { return options_.warmup + options_.steps; }
  int signal() const { return context_.signal ? context_.signal() : 0; }

  absl::Status Join() {
    if (!context_.replica.join) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(replicas_,
                          context_.replica.join(&run_, last_step(), done_));
    return absl::OkStatus();
  }

  // Returns true if no step is left, else begun_ is the step.
  absl::StatusOr<bool> BeginStep() {
    if (replicas_ == nullptr) {
      if (begun_ >= last_step()) return true;
      ++begun_;
      return false;
    }
    const auto part = replicas_->BeginStep();
    FSDP_RETURN_IF_ERROR(UnlessStopped(part.status()));
    if (!part->has_value()) return true;
    const fsdp::Replicas::Step& step = **part;
    // The state of another replica may just have brought this one here.
    done_ = step.step;
    begun_ = step.step + 1;
    part_ = step.index;
    return false;
  }

  // Replicas stop one after the other, which breaks off what others have begun.
  absl::Status UnlessStopped(const absl::Status& status) const {
    if (status.ok() || replicas_ == nullptr || signal() == 0) return status;
    return absl::CancelledError(absl::StrCat("stopped: ", status.message()));
  }

  fsdp::checkpoint::RunGuardOptions GuardOptions() {
    fsdp::checkpoint::RunGuardOptions guard;
    guard.save_every = options_.save_every;
    guard.save_async = options_.save_async;
    guard.before_save = [this](int64_t /*step*/) {
      return IsFirst() || guard_.signal() != 0;
    };
    guard.signal = [this] { return signal(); };
    return guard;
  }

  bool IsFirst() const {
    if (replicas_ == nullptr) return true;
    const std::string members = replicas_->Members();
    const int number = context_.replica.number;
    return members.empty()
               ? number == 0
               : absl::StartsWith(members, absl::StrCat(number, "."));
  }

  void TellMembers() {
    if (replicas_ == nullptr || !context_.replica.on_members) return;
    const std::string members = replicas_->Members();
    if (members == members_) return;
    members_ = members;
    context_.replica.on_members(done_, members);
  }

  absl::Status Step(int64_t step, Batches& data) {
    const fsdp::TraceStep traced(step);
    Batch batch;
    {
      const fsdp::TraceSpan span("data");
      batch = data.Of(step - 1, part_);
    }
    const absl::Time begin = absl::Now();
    begins_.push_back(begin);
    const absl::StatusOr<at::Tensor> loss =
        Gradients(batch, model_, replicas_.get());
    if (!loss.ok()) return InStep(step, UnlessStopped(loss.status()));
    FSDP_RETURN_IF_ERROR(InStep(
        step, fsdp::TorchToStatus("loss", [&] { losses_.Push(*loss); })));
    if (loss->is_cpu()) FSDP_RETURN_IF_ERROR(EndStep());
    FSDP_RETURN_IF_ERROR(InStep(step, fsdp::TorchToStatus("optimizer", [this] {
                                  const fsdp::TraceSpan span("optimizer");
                                  optimizer_.step();
                                  optimizer_.zero_grad();
                                })));
    // EndStep() came before the optimizer, which belongs to the same step.
    if (loss->is_cpu() && step > options_.warmup) {
      result_.step_seconds.back() = absl::ToDoubleSeconds(absl::Now() - begin);
    }
    return losses_.size() > 1 ? EndStep() : absl::OkStatus();
  }

  absl::Status Resume() {
    std::optional<int64_t> step;
    if (context_.checkpoints != nullptr && options_.resume) {
      FSDP_ASSIGN_OR_RETURN(step, context_.checkpoints->LoadLatest(run_));
    }
    done_ = step.value_or(done_);
    // These flags decide which batch a step trains on.
    const auto odd = fsdp::checkpoint::NoteFlags(
        {{"--batch", absl::StrCat(options_.batch)},
         {"--seed", absl::StrCat(options_.seed)},
         {"--seq", absl::StrCat(options_.model.seq)}},
        done_, last_step(), &run_);
    if (step.has_value() && context_.on_resumed) {
      context_.on_resumed(*step, odd);
    }
    return absl::OkStatus();
  }

  static absl::Status InStep(int64_t step, const absl::Status& status) {
    return status.ok() ? status
                       : fsdp::Annotate(status, absl::StrCat("step ", step));
  }

  // Waits for the loss of the oldest step that is not done.
  absl::Status EndStep() {
    const int64_t step = done_ + 1;
    absl::StatusOr<double> loss = losses_.Pop(absl::Now() + timeout_);
    if (!loss.ok()) return InStep(step, loss.status());
    FSDP_RETURN_IF_ERROR(guard_.MayStep(step, *loss).status());
    const absl::Time now = absl::Now();
    if (step > options_.warmup) {
      result_.step_seconds.push_back(
          absl::ToDoubleSeconds(now - std::max(begins_.front(), last_end_)));
    }
    begins_.pop_front();
    last_end_ = now;
    done_ = step;
    TellMembers();
    result_.own_losses.push_back(*loss);
    result_.mean_losses.push_back(guard_.mean_loss());
    if (context_.on_step) context_.on_step(step, result_.mean_losses.back());
    return absl::OkStatus();
  }

  const TrainOptions& options_;
  const TrainerContext& context_;
  TrainableModel& model_;
  const absl::Duration timeout_;
  fsdp::FusedAdamW optimizer_;
  LossQueue losses_;               // of the steps that are not done
  std::deque<absl::Time> begins_;  // of the steps that are not done
  absl::Time last_end_ = absl::InfinitePast();
  int64_t done_;
  int64_t begun_ = 0;  // the last step that has begun
  int part_ = 0;       // of it, among replicas
  bool is_timed_ = false;
  fsdp::checkpoint::TrainingRun run_;
  std::unique_ptr<fsdp::Replicas> replicas_;  // or null
  std::string members_;                       // of replicas_, as last told
  fsdp::checkpoint::RunGuard guard_;
  TrainingResult result_;
};

}  // namespace

absl::StatusOr<TrainingResult> Train(
    const TrainOptions& options, const TrainerContext& context,
    TrainableModel& model, Batches& data,
    const std::shared_ptr<Communicator>& ranks) {
  return Training(options, context, model, ranks).Run(data);
}

}  // namespace gpt
