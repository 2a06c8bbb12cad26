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

#include "fsdp/optim/training_step.h"

namespace fsdp::checkpoint {

// The parts of a run that are saved. All pointers are borrowed and outlive the
// calls that get the run. Every rank passes its own objects of the same kinds;
// `entries` are those of rank 0.
struct TrainingRun {
  // A model that FullyShard() has returned, or any module: then every rank has
  // all of it, and rank 0's values are saved. Never null.
  torch::nn::Module* model = nullptr;
  // SGD, Adam, AdamW, Adagrad or RMSprop of torch::optim, or a fused optimizer,
  // over the model's parameters; or null.
  torch::optim::Optimizer* optimizer = nullptr;
  // Schedulers of the optimizer's learning rates.
  std::vector<torch::optim::LRScheduler*> schedulers = {};
  std::vector<torch::optim::ReduceLROnPlateauScheduler*> plateau_schedulers =
      {};
  ShardedGradScaler* scaler = nullptr;  // or null
  WeightAverage* average = nullptr;     // of the model's parameters; or null
  // If true, the default random generators of the CPU and of the model's device
  // are saved and loaded, too.
  bool random_state = true;
  // Texts of the user's own, which a load replaces: `entries` belong to the
  // whole run, `rank_entries` to this rank, such as its position in the data.
  // Names and texts are UTF-8.
  std::map<std::string, std::string> entries = {};
  std::map<std::string, std::string> rank_entries = {};
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_RUN_H_
