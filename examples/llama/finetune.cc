// Fine-tunes a Hugging Face model, sharded over two ranks, and hands it back:
//   bazel run //examples/llama:finetune -- MODEL_FOLDER TOKENS.bin NEW_FOLDER
// Paths are absolute, as `bazel run` starts programs in a folder of its own.
// With --device=cuda behind them, finetune_cuda trains on one GPU, by itself.
// //examples/llama:train has all the choices; this is how little it takes.
#include <torch/optim/adamw.h>

#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "checkpoint/model_files.h"
#include "comm/agreement.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/data/token_file.h"
#include "examples/llama/training/model.h"
#include "fsdp/optim/fused_optimizer.h"

absl::Status FineTune(const std::string& folder, const std::string& tokens,
                      const std::string& trained, torch::Device device,
                      const std::shared_ptr<fsdp::comm::Communicator>& ranks) {
  const bool is_first = ranks->rank() == 0;
  FSDP_RETURN_IF_ERROR(fsdp::comm::Agree(
      *ranks,
      is_first ? fsdp::checkpoint::CheckCanExport(trained) : absl::OkStatus(),
      "preparing", absl::Now() + ranks->default_timeout()));
  FSDP_ASSIGN_OR_RETURN(const auto config, llama::ReadConfig(folder));
  llama::ModelOptions options;
  options.device = device;
  options.compute = llama::DtypeOf(std::nullopt, device.type(), nullptr);
  options.loaded_later = true;  // no rank ever has all of it
  FSDP_ASSIGN_OR_RETURN(llama::Model model,
                        llama::MakeModel(config, options, ranks));
  FSDP_RETURN_IF_ERROR(llama::LoadBase(folder, config, *model));

  FSDP_ASSIGN_OR_RETURN(const auto file, llama::TokenFile::Open(tokens));
  FSDP_ASSIGN_OR_RETURN(
      const auto rows,
      llama::WindowRows(file, /*seq=*/256, llama::LastWindow::kLeftOut));
  FSDP_ASSIGN_OR_RETURN(
      auto batches,
      llama::TokenBatches::Create(
          rows, {/*rows=*/8, ranks->rank(), ranks->world_size()}, /*seed=*/1));
  fsdp::FusedAdamW optimizer(model->Parameters(),
                             torch::optim::AdamWOptions(2e-5));
  for (int step = 0; step < 100; ++step) {
    FSDP_ASSIGN_OR_RETURN(const llama::Batch batch, batches.Next());
    const torch::Tensor loss =
        model->forward(batch.tokens.to(device), llama::DocumentStarts(),
                       batch.targets.to(device));
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    FSDP_RETURN_IF_ERROR(model->ClipGradNorm(1.0).status());
    optimizer.step();
    optimizer.zero_grad();
    FSDP_ASSIGN_OR_RETURN(const double mean,
                          fsdp::comm::Mean(*ranks, loss.item<double>()));
    if (is_first) {
      std::cout << "step " << step << "  loss " << mean << std::endl;
    }
  }
  FSDP_ASSIGN_OR_RETURN(auto texts, llama::TextsBeside(folder));
  return llama::ExportTrained(trained, std::move(texts), torch::kBFloat16,
                              model, /*has_adapters=*/false);
}

int main(int argc, char** argv) {
  const bool on_gpu = argc == 5 && std::string(argv[4]) == "--device=cuda";
  if (argc != 4 && !on_gpu) {
    std::cerr << "usage: finetune MODEL_FOLDER TOKENS.bin NEW_FOLDER "
                 "[--device=cuda]\n";
    return 2;
  }
  const int ranks_to_run = on_gpu ? 1 : 2;
  const auto choice = fsdp::comm::ChooseDeviceOfProcess(
      on_gpu ? torch::kCUDA : torch::kCPU, ranks_to_run, /*nccl_on=*/nullptr);
  if (!choice.ok()) {
    std::cerr << choice.status() << std::endl;
    return 1;
  }
  fsdp::comm::ConnectOptions connect;
  connect.device = choice->connect;
  return fsdp::comm::RunRanks(
      argc, argv, ranks_to_run,
      [&](std::shared_ptr<fsdp::comm::Communicator> ranks) {
        return FineTune(argv[1], argv[2], argv[3], choice->device, ranks);
      },
      connect);
}
