// The model of a run as the training loop sees it, with the checkpoints to go
// on from and the trained model for others.
#ifndef TESTING_GPT_TRAINABLE_MODEL_H_
#define TESTING_GPT_TRAINABLE_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/checkpointer.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/resting/offload_space.h"
#include "testing/gpt/model.h"
#include "testing/gpt/options.h"

namespace gpt {

// The model, sharded or, with --sharding=none, plain. A value: copies refer to
// the same model. Thread-compatible. With several ranks every call is
// collective.
class TrainableModel {
 public:
  using Sharded = fsdp::FullyShardedDataParallel<GptImpl>;

  TrainableModel() = default;  // no model
  explicit TrainableModel(Gpt plain) : plain_(std::move(plain)) {}
  explicit TrainableModel(Sharded sharded) : sharded_(std::move(sharded)) {}

  // Turns tokens into logits. Throws, as forwards do.
  at::Tensor Forward(const at::Tensor& tokens);
  absl::Status Backward(const at::Tensor& loss);
  // Returns the leaves for an element-wise optimizer.
  std::vector<at::Tensor> OptimizerParameters();
  // Returns the module that is saved and loaded.
  torch::nn::Module& module();
  // Returns the space for what rests elsewhere, null if nothing may.
  const fsdp::OffloadSpace* offload() const;

 private:
  // One of these is not null.
  Gpt plain_{nullptr};
  Sharded sharded_{nullptr};
};

// Shards as the options say: every block is a unit; the embeddings and the head
// are the root's. With options.automatic rank 0 prints the table of what
// fsdp::ChooseOptions() has considered. Without sharding every rank has all of
// the model. Collective.
absl::StatusOr<TrainableModel> MakeTrainable(
    const TrainOptions& options, Gpt model,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks);

// Refuses what ParseFlags() cannot know: models that differ between ranks and,
// without --resume, a folder that has checkpoints. Null without --save.
// Collective.
absl::StatusOr<std::unique_ptr<fsdp::checkpoint::Checkpointer>> OpenCheckpoints(
    const TrainOptions& options,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks);

// Returns what would keep ExportTrained() from writing --export, as far as that
// is known before the training. Not collective.
absl::Status CheckExport(const TrainOptions& options, int world_size);

// Writes the folder --export. Collective.
absl::Status ExportTrained(const TrainOptions& options, TrainableModel& model,
                           fsdp::comm::Communicator& ranks);

}  // namespace gpt

#endif  // TESTING_GPT_TRAINABLE_MODEL_H_
