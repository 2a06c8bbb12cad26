// The parts of a training run that are saved and loaded.
#ifndef CHECKPOINT_RUN_RUN_H_
#define CHECKPOINT_RUN_RUN_H_

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/optim/grad_scaler.h"
#include "fsdp/optim/weight_average.h"

namespace fsdp::checkpoint {

// Borrowed: all of it outlives the calls that get it. Ranks pass the same, each
// its own; `entries` count on rank 0 only.
struct TrainingRun {
  // Sharded by FullyShard(), or any module: then every rank has all of it, and
  // rank 0's values are saved. Never null.
  torch::nn::Module* model = nullptr;
  // SGD, Adam, AdamW, Adagrad or RMSprop of torch::optim, or fused ones, over
  // the model's parameters; or null.
  torch::optim::Optimizer* optimizer = nullptr;
  // Of the optimizer's learning rates.
  std::vector<torch::optim::LRScheduler*> schedulers = {};
  std::vector<torch::optim::ReduceLROnPlateauScheduler*> plateau_schedulers =
      {};
  ShardedGradScaler* scaler = nullptr;  // or null
  WeightAverage* average = nullptr;     // of the model's parameters; or null
  // The default random generators of the CPU and of the model's device.
  bool random_state = true;
  // The user's own, replaced by loading: of the whole run, and of this rank,
  // such as where it is in its data. Names and texts are UTF-8.
  std::map<std::string, std::string> entries = {};
  std::map<std::string, std::string> rank_entries = {};
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RUN_H_
