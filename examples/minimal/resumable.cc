// The smallest training that goes on where it was when it was stopped or
// killed. Its argument is a folder for its checkpoints, by its absolute path:
// `bazel run` starts programs in a folder of its own.
#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>

#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "comm/launcher/launch_options.h"
#include "comm/run_ranks/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"

absl::Status Train(const std::string& folder,
                   const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  torch::manual_seed(ranks->rank());  // every rank its own part of the data
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  FSDP_ASSIGN_OR_RETURN(auto model, fsdp::FullyShard(net, ranks));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);

  FSDP_ASSIGN_OR_RETURN(auto checkpoints,
                        fsdp::checkpoint::Checkpointer::Open(folder, ranks));
  fsdp::checkpoint::TrainingRun run;  // with the random states, by default
  run.model = model.get();
  run.optimizer = &optimizer;
  FSDP_ASSIGN_OR_RETURN(const auto newest, checkpoints->LoadLatest(run));
  fsdp::checkpoint::RunGuardOptions options;
  options.save_every = 100;  // beside the next steps
  fsdp::checkpoint::RunGuard guard(ranks, checkpoints.get(), &run, options);
  for (int64_t step = newest.value_or(0) + 1; step <= 1000; ++step) {
    torch::Tensor x = torch::randn({32, 64});
    torch::Tensor loss =
        torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    FSDP_ASSIGN_OR_RETURN(torch::Tensor norm, model->ClipGradNorm(100));
    FSDP_ASSIGN_OR_RETURN(
        const bool is_finite,
        guard.MayStep(step, loss.item<double>(), norm.item<double>()));
    if (is_finite) optimizer.step();
    FSDP_RETURN_IF_ERROR(guard.EndStep(step, /*is_last=*/step == 1000));
    if (ranks->rank() == 0 && step % 100 == 0) {
      std::cout << "step " << step << "  " << guard.mean_loss() << std::endl;
    }
  }
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  const fsdp::comm::StopRequest stop;  // by signals, heeded by RunGuard
  if (argc != 2 || argv[1][0] != '/') {
    std::cerr << "usage: resumable /ABSOLUTE/PATH\n";
    return 1;
  }
  return fsdp::comm::RunRanks(
      argc, argv, /*ranks=*/2,
      [argv](const auto& ranks) { return Train(argv[1], ranks); });
}
