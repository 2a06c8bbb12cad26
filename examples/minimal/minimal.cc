// The smallest sharded training. Two ranks on this host, each started by hand
// or by any launcher that sets torchrun's variables:
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 minimal &
//   RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500 minimal
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <memory>

#include "base/status_error.h"
#include "base/torch_status.h"
#include "comm/bootstrap.h"
#include "comm/environment.h"
#include "fsdp/fully_sharded_data_parallel.h"

void Train() {
  std::shared_ptr<fsdp::comm::Communicator> ranks =
      fsdp::ValueOrThrow(fsdp::comm::Connect(
          fsdp::ValueOrThrow(fsdp::comm::ReadEnvironment(std::getenv))));
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  fsdp::Options options;
  options.wrap_policy = fsdp::WrapModules<torch::nn::LinearImpl>();
  auto model = fsdp::ValueOrThrow(fsdp::FullyShard(net, ranks, options));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);

  torch::manual_seed(ranks->rank());  // every rank its own part of the data
  for (int step = 0; step < 100; ++step) {
    torch::Tensor x = torch::randn({32, 64});
    torch::Tensor loss =
        torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    optimizer.zero_grad();
    fsdp::ThrowIfError(model->Backward(loss));
    optimizer.step();
    if (step % 20 == 0 && ranks->rank() == 0) {
      std::cout << "step " << step << "  loss " << loss.item<float>() << "\n";
    }
  }
}

int main() {
  const absl::Status status = fsdp::TorchToStatus("training", Train);
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
