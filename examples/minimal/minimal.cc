// The smallest sharded training: two ranks, which are processes of this host,
// or as many as a launcher that sets torchrun's variables has started.
#include <torch/torch.h>

#include <iostream>
#include <memory>

#include "base/status_macros.h"
#include "comm/agreement.h"
#include "comm/run_ranks/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"

absl::Status Train(const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  fsdp::Options options;
  options.wrap_policy = fsdp::WrapModules<torch::nn::LinearImpl>();
  FSDP_ASSIGN_OR_RETURN(auto model, fsdp::FullyShard(net, ranks, options));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);

  torch::manual_seed(ranks->rank());  // every rank its own part of the data
  for (int step = 0; step < 100; ++step) {
    torch::Tensor x = torch::randn({32, 64});
    torch::Tensor loss =
        torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    optimizer.step();
    if (step % 20 != 0) continue;
    FSDP_ASSIGN_OR_RETURN(const double mean,
                          fsdp::comm::Mean(*ranks, loss.item<double>()));
    if (ranks->rank() == 0) {
      std::cout << "step " << step << "  loss " << mean << std::endl;
    }
  }
  return absl::OkStatus();
}

int main(int argc, char** argv) {
  return fsdp::comm::RunRanks(argc, argv, /*ranks=*/2, Train);
}
