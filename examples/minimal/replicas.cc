// The smallest training of two replicas of two ranks each: kill any of its
// ranks while it runs.
#include "replicas/replicas.h"

#include <torch/torch.h>

#include <iostream>
#include <memory>

#include "base/status_macros.h"
#include "checkpoint/run/run.h"
#include "comm/startup/environment.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "replicas/launcher/run_replicas.h"

absl::Status Train(const std::shared_ptr<fsdp::comm::Communicator>& ranks,
                   const fsdp::comm::Environment& environment) {
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  FSDP_ASSIGN_OR_RETURN(auto model, fsdp::FullyShard(net, ranks));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);

  fsdp::checkpoint::TrainingRun run;
  run.model = model.get();
  run.optimizer = &optimizer;
  fsdp::ReplicaOptions options;
  options.steps = 1000;
  FSDP_ASSIGN_OR_RETURN(auto replicas,
                        fsdp::Replicas::Join(environment, &run, options));
  for (;;) {
    FSDP_ASSIGN_OR_RETURN(const auto step, replicas->BeginStep());
    if (!step.has_value()) return absl::OkStatus();  // the run is over
    // Every rank of every replica its own part of the data.
    torch::manual_seed((step->step * step->size + step->index) *
                           ranks->world_size() +
                       ranks->rank());
    torch::Tensor x = torch::randn({32, 64});
    torch::Tensor loss =
        torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    FSDP_RETURN_IF_ERROR(replicas->FinishStep());
    optimizer.step();
    if (step->step % 100 == 99 && ranks->rank() == 0) {
      std::cout << "step " << step->step + 1 << " by replicas "
                << replicas->Members() << ": loss " << loss.item<float>()
                << std::endl;
    }
  }
}

int main(int argc, char** argv) {
  fsdp::comm::RestartOptions restarts;
  restarts.max_restarts = 100;  // of each replica
  restarts.max_without_progress = 100;
  return fsdp::replicas::RunReplicas(argc, argv, {/*replicas=*/2, /*ranks=*/2},
                                     Train, {}, restarts);
}
