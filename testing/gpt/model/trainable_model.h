// The model as the training loop sees it: unsharded on one rank, or sharded.
#ifndef TESTING_GPT_MODEL_TRAINABLE_MODEL_H_
#define TESTING_GPT_MODEL_TRAINABLE_MODEL_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/offload_space.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/model/model.h"

namespace gpt {

// Thread-compatible. With several ranks every call is collective.
class TrainableModel {
 public:
  virtual ~TrainableModel() = default;

  // Turns tokens into logits. Throws, as forwards do.
  virtual at::Tensor Forward(const at::Tensor& tokens) = 0;
  virtual absl::Status Backward(const at::Tensor& loss) = 0;
  // Returns the leaves for an element-wise optimizer.
  virtual std::vector<at::Tensor> OptimizerParameters() = 0;
  // Returns the module that is saved and loaded.
  virtual torch::nn::Module& module() = 0;
  // Returns the space for what rests elsewhere, null if nothing may.
  virtual const fsdp::OffloadSpace* offload() const { return nullptr; }
};

// Makes a model that every rank has all of.
std::unique_ptr<TrainableModel> MakeUnsharded(Gpt model);

// Makes every block a unit; the embeddings and the head are the root's.
// `sharding` is not kNone. With `recompute` backward runs the blocks again.
// Collective.
absl::StatusOr<std::unique_ptr<TrainableModel>> MakeSharded(
    const Gpt& model, std::shared_ptr<fsdp::comm::Communicator> communicator,
    Sharding sharding = Sharding::kFull,
    ComputeDtype precision = ComputeDtype::kFloat,
    const fsdp::OffloadOptions& offload = fsdp::OffloadOptions(),
    bool recompute = false);

// Says what MakeAutomatic() may use, and on which batch a rank trains.
struct AutoSharding {
  int64_t memory_bytes = 0;
  ComputeDtype precision = ComputeDtype::kFloat;
  std::string directory;  // for files; empty: none
  GptConfig model;
  int64_t batch = 1;  // rows
};

// Shards with what fsdp::ChooseOptions() chooses. Writes the table of what it
// has considered to `out` on rank 0. Collective.
absl::StatusOr<std::unique_ptr<TrainableModel>> MakeAutomatic(
    const Gpt& model, const std::shared_ptr<fsdp::comm::Communicator>& ranks,
    const AutoSharding& wanted, std::ostream& out);

}  // namespace gpt

#endif  // TESTING_GPT_MODEL_TRAINABLE_MODEL_H_
