// The smallest training that goes on where it was when it was killed. Its
// argument is a folder for its checkpoints.
#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <memory>
#include <string>

#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "comm/run_ranks/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"

absl::Status Train(const std::string& folder,
                   const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  FSDP_ASSIGN_OR_RETURN(auto model, fsdp::FullyShard(net, ranks));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);
  torch::manual_seed(ranks->rank());  // every rank its own part of the data

  FSDP_ASSIGN_OR_RETURN(auto checkpoints,
                        fsdp::checkpoint::Checkpointer::Open(folder, ranks));
  fsdp::checkpoint::TrainingRun run;  // with the random states, by default
  run.model = model.get();
  run.optimizer = &optimizer;
  FSDP_ASSIGN_OR_RETURN(const auto newest, checkpoints->LoadLatest(run));
  for (int64_t step = newest.value_or(0) + 1; step <= 1000; ++step) {
    torch::Tensor x = torch::randn({32, 64});
    torch::Tensor loss =
        torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    optimizer.step();
    if (step % 100 != 0) continue;
    FSDP_RETURN_IF_ERROR(checkpoints->SaveAsync(step, run));  // beside the next
    if (ranks->rank() == 0) std::cout << "step " << step << std::endl;
  }
  return checkpoints->Wait();
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: resumable FOLDER\n";
    return 1;
  }
  return fsdp::comm::RunRanks(
      argc, argv, /*ranks=*/2,
      [argv](const auto& ranks) { return Train(argv[1], ranks); });
}
