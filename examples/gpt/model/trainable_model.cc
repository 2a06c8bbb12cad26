#include "examples/gpt/model/trainable_model.h"

#include <memory>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/precision/mixed_precision.h"

namespace gpt {
namespace {

class UnshardedModel final : public TrainableModel {
 public:
  explicit UnshardedModel(Gpt model) : model_(std::move(model)) {}

  at::Tensor Forward(const at::Tensor& tokens) override {
    return model_->forward(tokens);
  }
  absl::Status Backward(const at::Tensor& loss) override {
    return fsdp::TorchToStatus("backward", [&loss] { loss.backward(); });
  }
  std::vector<at::Tensor> OptimizerParameters() override {
    return model_->parameters();
  }
  torch::nn::Module& module() override { return *model_; }

 private:
  Gpt model_;
};

class ShardedGpt final : public TrainableModel {
 public:
  explicit ShardedGpt(fsdp::FullyShardedDataParallel<GptImpl> model)
      : model_(std::move(model)) {}

  at::Tensor Forward(const at::Tensor& tokens) override {
    return model_->forward(tokens);
  }
  absl::Status Backward(const at::Tensor& loss) override {
    return model_->Backward(loss);
  }
  std::vector<at::Tensor> OptimizerParameters() override {
    return model_->Parameters();
  }
  torch::nn::Module& module() override { return *model_; }
  const fsdp::OffloadSpace* offload() const override {
    return model_->offload();
  }

 private:
  fsdp::FullyShardedDataParallel<GptImpl> model_;
};

fsdp::ShardingStrategy StrategyOf(Sharding sharding) {
  switch (sharding) {
    case Sharding::kGradients:
      return fsdp::ShardingStrategy::kShardGradOp;
    case Sharding::kOptimizer:
      return fsdp::ShardingStrategy::kShardOptimizer;
    case Sharding::kReplicated:
      return fsdp::ShardingStrategy::kNoShard;
    default:
      return fsdp::ShardingStrategy::kFullShard;
  }
}

}  // namespace

std::unique_ptr<TrainableModel> MakeUnsharded(Gpt model) {
  return std::make_unique<UnshardedModel>(std::move(model));
}

absl::StatusOr<std::unique_ptr<TrainableModel>> MakeSharded(
    const Gpt& model, std::shared_ptr<fsdp::comm::Communicator> communicator,
    Sharding sharding, ComputeDtype precision,
    const fsdp::OffloadOptions& offload, bool recompute) {
  fsdp::Options options;
  options.unit.strategy = StrategyOf(sharding);
  if (precision == ComputeDtype::kBFloat16) {
    options.unit.precision = fsdp::ComputeIn(at::kBFloat16);
    options.unit.precision.output_dtype = at::kFloat;  // for the loss
  }
  options.offload = offload;
  options.wrap_policy = fsdp::WrapModules<BlockImpl>();
  if (recompute) options.recompute.units = fsdp::WrapModules<BlockImpl>();
  FSDP_ASSIGN_OR_RETURN(
      fsdp::FullyShardedDataParallel<GptImpl> sharded,
      fsdp::FullyShard(model, std::move(communicator), options));
  return std::make_unique<ShardedGpt>(std::move(sharded));
}

}  // namespace gpt
