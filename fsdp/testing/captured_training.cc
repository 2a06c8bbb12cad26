#include "fsdp/testing/captured_training.h"

#include <torch/optim/adamw.h>

#include "base/testing/fake_device.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::testing {

at::Tensor Training::Batch(int i) {
  return Rows(int64_t{3} * i, 3, kDim).to(FakeDevice::device());
}

double Training::RateOf(int i) { return static_cast<float>(1e-2 / (1 + i)); }

void Training::SetRate(int i) {
  for (auto& group : optimizer->param_groups()) {
    group.options().set_lr(RateOf(i));
  }
}

absl::StatusOr<at::Tensor> Training::RunEagerly(int i) {
  SetRate(i);
  return step({Batch(i)});
}

std::vector<at::Tensor> Training::Shards() const {
  std::vector<at::Tensor> shards;
  for (const TensorRange& named : model->Ranges()) {
    shards.push_back(named.values.detach().cpu().clone());
  }
  return shards;
}

absl::StatusOr<std::shared_ptr<Communicator>> FakeDeviceWorld(int world_size) {
  return OneOf(world_size, FakeDevice::device());
}

absl::StatusOr<std::unique_ptr<Training>> StartTraining(
    const DeviceProgram& program, int world_size,
    const std::function<void(Options&)>& configure,
    std::shared_ptr<Communicator> world) {
  auto training = std::make_unique<Training>();
  if (world == nullptr) {
    FSDP_ASSIGN_OR_RETURN(world, FakeDeviceWorld(world_size));
  }
  const std::shared_ptr<NetImpl> net =
      MakeNet(Training::kDim, Training::kBlocks);
  FakeDevice::Move(net->parameters());
  Options options = BlockUnits();
  program.configure(options);
  configure(options);
  FSDP_ASSIGN_OR_RETURN(training->model, FullyShard(net, world, options));
  auto optimizer =
      std::make_unique<FusedAdamW>(training->model->Parameters(),
                                   torch::optim::AdamWOptions(1e-2).eps(1e-3));
  if (program.steps_in_backward) {
    FSDP_RETURN_IF_ERROR(training->model->StepInBackward(
        [o = optimizer.get()](absl::Span<const TensorRange> unit) {
          return o->StepUnit(unit);
        }));
  }
  training->optimizer = std::move(optimizer);
  training->step =
      [t = training.get(),
       program](const CapturedStep::Inputs& in) -> absl::StatusOr<at::Tensor> {
    at::Tensor loss;
    FSDP_RETURN_IF_ERROR(program.step(t->model, [&] {
      loss = Loss(t->model->forward(in[0]), in[0]);
      return loss;
    }));
    if (program.clips) {
      FSDP_RETURN_IF_ERROR(t->model->ClipGradNorm(/*max_norm=*/0.1).status());
    }
    if (!program.steps_in_backward) t->optimizer->step();
    t->optimizer->zero_grad();
    return loss;
  };
  return training;
}

CaptureOptions CapturedOnTheFakeDevice() {
  CaptureOptions options;
  options.make_graph = &FakeDeviceGraph::Make;
  return options;
}

}  // namespace fsdp::testing
