// The residual MLP that benchmarks of training steps shard.
#ifndef BENCHMARKS_SHARDED_MLP_H_
#define BENCHMARKS_SHARDED_MLP_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/testing/recording_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"

namespace fsdp {

// A block of 2.1 million parameters.
class ResidualBlockImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = 512;

  ResidualBlockImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Linear fc, out;
};

class ResidualMlpImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = ResidualBlockImpl::kDim;
  static constexpr int kBlocks = 8;

  ResidualMlpImpl();
  at::Tensor forward(const at::Tensor& x);

  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};

at::Tensor ReconstructionLoss(const at::Tensor& output, const at::Tensor& x);

using ShardedMlp = FullyShardedDataParallel<ResidualMlpImpl>;

// Each block is a unit.
ShardedMlp ShardMlp(std::shared_ptr<comm::Communicator> ranks,
                    Options options = Options());

using Group = std::vector<std::shared_ptr<comm::Communicator>>;

// Connects ranks of this process by "local", "shared_memory" or "gloo". Their
// collectives are recorded unless `log` is null.
Group MakeGroup(const std::string& backend, int ranks,
                comm::CollectiveLog* log = nullptr);

// Returns a function that trains `model` for a step, by AdamW on `rows` random
// rows, the same ones each time.
std::function<void()> StepOf(ShardedMlp model, int64_t rows);

}  // namespace fsdp

#endif  // BENCHMARKS_SHARDED_MLP_H_
