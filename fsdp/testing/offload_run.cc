#include "fsdp/testing/offload_run.h"

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;
constexpr int64_t kRows = 3;  // of a rank and backward

class Run {
 public:
  Run(const OffloadScenario& scenario, ToyModel model)
      : scenario_(scenario), model_(std::move(model)) {
    const std::vector<at::Tensor> shards = model_->Parameters();
    if (scenario.sgd) {
      auto sgd = std::make_unique<FusedSGD>(
          shards, torch::optim::SGDOptions(0.05).momentum(0.9).dampening(0.1));
      step_unit_ = [optimizer = sgd.get()](absl::Span<const TensorRange> unit) {
        return optimizer->StepUnit(unit);
      };
      optimizer_ = std::move(sgd);
    } else {
      auto adamw = std::make_unique<FusedAdamW>(
          shards, torch::optim::AdamWOptions(1e-2).amsgrad(true));
      step_unit_ = [optimizer =
                        adamw.get()](absl::Span<const TensorRange> unit) {
        return optimizer->StepUnit(unit);
      };
      optimizer_ = std::move(adamw);
    }
  }

  absl::StatusOr<OffloadRecord> Go() {
    if (scenario_.step_in_backward) {
      FSDP_RETURN_IF_ERROR(model_->StepInBackward(step_unit_));
    }
    if (scenario_.scaler) {
      GradScalerOptions options;
      options.init_scale = 1024;
      options.growth_interval = 7;
      FSDP_ASSIGN_OR_RETURN(
          scaler_, ShardedGradScaler::Create(model_->communicator(), options));
    }
    for (int step = 0; step < scenario_.steps; ++step) {
      FSDP_RETURN_IF_ERROR(scenario_.before_step(model_, *optimizer_, step));
      FSDP_RETURN_IF_ERROR(Step(step));
    }
    FSDP_RETURN_IF_ERROR(Finish());
    return record_;
  }

 private:
  absl::Status Step(int step) {
    comm::Communicator& world = model_->communicator();
    model_->zero_grad(scenario_.zero_to_none);
    for (int i = 0; i < scenario_.backwards; ++i) {
      std::optional<NoSyncScope> no_sync;
      if (scenario_.no_sync && i + 1 < scenario_.backwards) {
        no_sync.emplace(model_->NoSync());
      }
      const int64_t part =
          (step * scenario_.backwards + i) * world.world_size() + world.rank();
      const at::Tensor x = Rows(part * kRows, kRows, kDim);
      at::Tensor loss = Loss(model_->forward(x), x) / scenario_.backwards;
      record_.losses.push_back(loss.item<double>());
      if (scaler_) loss = scaler_->Scale(loss);
      FSDP_RETURN_IF_ERROR(model_->Backward(loss));
    }
    return Update();
  }

  absl::Status Update() {
    if (scaler_) {
      FSDP_RETURN_IF_ERROR(scaler_->Unscale(model_->Ranges()).status());
    }
    if (scenario_.max_norm > 0) {
      FSDP_ASSIGN_OR_RETURN(const at::Tensor norm,
                            model_->ClipGradNorm(scenario_.max_norm));
      record_.norms.push_back(norm.item<double>());
    }
    if (scaler_) {
      FSDP_RETURN_IF_ERROR(
          scaler_->Step(*optimizer_, model_->Ranges()).status());
      return scaler_->Update();
    }
    if (!scenario_.step_in_backward) optimizer_->step();
    return absl::OkStatus();
  }

  absl::Status Finish() {
    FSDP_ASSIGN_OR_RETURN(const StateDict parameters,
                          model_->GatherStateDict());
    for (const auto& item : parameters) {
      record_.tensors[item.key()] = item.value();
    }
    FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict states,
                          model_->GatherOptimizerState(*optimizer_));
    for (const auto& item : states.tensors) {
      record_.tensors[item.key()] = item.value();
    }
    for (const auto& [name, number] : states.numbers) {
      record_.norms.push_back(static_cast<double>(number));
    }
    return CheckTraffic();
  }

  // If nothing has left memory, nothing was compared.
  absl::Status CheckTraffic() const {
    const OffloadSpace* const space = model_->sharded_model().offload();
    if (space == nullptr) return absl::OkStatus();
    for (int kind = 0; kind < kNumRestingKinds; ++kind) {
      const bool moves = space->plan().bytes[kind].ssd > 0;
      if (moves != (space->stats().stores[kind].writes.bytes > 0)) {
        return absl::InternalError(
            absl::StrCat("another traffic than planned of kind ", kind));
      }
    }
    return absl::OkStatus();
  }

  const OffloadScenario& scenario_;
  ToyModel model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  ShardedModel::UnitStep step_unit_;
  std::optional<ShardedGradScaler> scaler_;
  OffloadRecord record_;
};

}  // namespace

absl::StatusOr<OffloadRecord> Train(const OffloadScenario& scenario,
                                    const comm::Mesh& mesh,
                                    const OffloadOptions& offload) {
  Options options = BlockUnits();
  scenario.configure(options);
  options.offload = offload;
  options.offload.optimizer_state = scenario.sgd ? 1 : 3;
  FSDP_ASSIGN_OR_RETURN(ToyModel model,
                        FullyShard(MakeNet(kDim, kBlocks), mesh, options));
  return Run(scenario, std::move(model)).Go();
}

absl::Status CheckSameBits(const OffloadRecord& actual,
                           const OffloadRecord& expected) {
  FSDP_RETURN_IF_ERROR(
      CheckThat(actual.losses, ::testing::Eq(expected.losses), "losses"));
  FSDP_RETURN_IF_ERROR(CheckThat(actual.norms, ::testing::Eq(expected.norms),
                                 "norms, one for each step"));
  if (actual.tensors.size() != expected.tensors.size()) {
    return absl::InternalError(absl::StrCat(actual.tensors.size(),
                                            " parameters and states, not ",
                                            expected.tensors.size()));
  }
  for (const auto& [name, value] : expected.tensors) {
    const auto found = actual.tensors.find(name);
    if (found == actual.tensors.end()) {
      return absl::InternalError(absl::StrCat("no ", name));
    }
    if (!at::equal(found->second, value)) {
      return absl::InternalError(absl::StrCat(name, " differs"));
    }
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing
