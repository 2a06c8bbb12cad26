#include "testing/gpt/model/trainable_model.h"

#include <ATen/ops/randint.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/mixed_precision.h"
#include "planner/choose/choose_options.h"

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
    return model_->sharded_model().offload();
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

fsdp::Options OptionsOf(ComputeDtype precision) {
  fsdp::Options options;
  options.wrap_policy = fsdp::WrapModules<BlockImpl>();
  if (precision == ComputeDtype::kBFloat16) {
    options.unit.precision = fsdp::ComputeIn(at::kBFloat16);
    options.unit.precision.output_dtype = at::kFloat;  // for the loss
  }
  return options;
}

absl::StatusOr<std::unique_ptr<TrainableModel>> Shard(
    const Gpt& model, std::shared_ptr<fsdp::comm::Communicator> ranks,
    const fsdp::Options& options) {
  FSDP_ASSIGN_OR_RETURN(fsdp::FullyShardedDataParallel<GptImpl> sharded,
                        fsdp::FullyShard(model, std::move(ranks), options));
  return std::make_unique<ShardedGpt>(std::move(sharded));
}

}  // namespace

std::unique_ptr<TrainableModel> MakeUnsharded(Gpt model) {
  return std::make_unique<UnshardedModel>(std::move(model));
}

absl::StatusOr<std::unique_ptr<TrainableModel>> MakeSharded(
    const Gpt& model, std::shared_ptr<fsdp::comm::Communicator> communicator,
    Sharding sharding, ComputeDtype precision,
    const fsdp::OffloadOptions& offload, bool recompute) {
  fsdp::Options options = OptionsOf(precision);
  options.unit.strategy = StrategyOf(sharding);
  options.offload = offload;
  if (recompute) options.recompute.units = fsdp::WrapModules<BlockImpl>();
  return Shard(model, std::move(communicator), options);
}

absl::StatusOr<std::unique_ptr<TrainableModel>> MakeAutomatic(
    const Gpt& model, const std::shared_ptr<fsdp::comm::Communicator>& ranks,
    const AutoSharding& wanted, std::ostream& out) {
  fsdp::AutoOptions options;
  options.memory_bytes = wanted.memory_bytes;
  options.rows = wanted.batch;
  options.base = OptionsOf(wanted.precision);
  options.base.offload.directory = wanted.directory;
  const c10::Device device = model->parameters().front().device();
  options.loss = [&](int64_t rows) {
    const at::Tensor tokens =
        at::randint(wanted.model.vocab, {rows, wanted.model.seq},
                    at::TensorOptions(at::kLong).device(device));
    return NextTokenLoss(model.ptr()->forward(tokens).to(at::kFloat), tokens);
  };
  FSDP_ASSIGN_OR_RETURN(const fsdp::AutoChoice choice,
                        fsdp::ChooseOptions(model.ptr(), ranks, options));
  if (ranks->rank() == 0) out << choice.ToString() << std::flush;
  return Shard(model, ranks, choice.options);
}

}  // namespace gpt
