#include "testing/gpt/testing/plain_training.h"

#include <ATen/ops/cat.h>
#include <torch/optim/adamw.h>

#include "fsdp/optim/fused_optimizer.h"
#include "testing/gpt/trainer.h"

namespace gpt::testing {
std::vector<double> PlainLosses(const PlainTraining& training) {
  Gpt model(training.model);
  InitializeParameters(*model, training.seed);
  fsdp::FusedAdamW fused(model->parameters(),
                         torch::optim::AdamWOptions(kLearningRate));
  torch::optim::AdamW reference(model->parameters(),
                                torch::optim::AdamWOptions(kLearningRate));
  std::vector<Batches> streams;
  streams.reserve(training.ranks);
  for (int rank = 0; rank < training.ranks; ++rank) {
    streams.emplace_back(training.model.vocab, training.shape,
                         Place{rank, training.ranks});
  }
  std::vector<double> losses;
  for (int64_t step = 0; step < training.steps; ++step) {
    std::vector<at::Tensor> inputs, targets;
    for (Batches& stream : streams) {
      const Batch batch = stream.Of(step);
      inputs.push_back(batch.inputs);
      targets.push_back(batch.targets);
    }
    const at::Tensor loss =
        NextTokenLoss(model->forward(at::cat(inputs)), at::cat(targets));
    loss.backward();
    if (training.optimizer == Optimizer::kFused) {
      fused.step();
    } else {
      reference.step();
    }
    reference.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

}  // namespace gpt::testing
