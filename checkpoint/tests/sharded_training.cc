#include "checkpoint/tests/sharded_training.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <random>
#include <set>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/check_that.h"
#include "comm/agreement.h"
#include "comm/mesh.h"
#include "fsdp/model/forward.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/strategies.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/testing/toy_transformer.h"
#include "fsdp/testing/training_task.h"
#include "gmock/gmock.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::testing::BlockImpl;
using ::fsdp::testing::CheckThat;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::LayerImpl;
using ::fsdp::testing::TransformerImpl;

constexpr int64_t kDim = 5;

// A model whose parameters are of every kind that files have to get right: a
// channels_last weight, a transposed one, one without dimensions, an empty
// one, a frozen one, one that never has a gradient, one for no optimizer
// ("left_out") and one that is not sharded ("ignored"); buffers of two dtypes
// that each rank's data decide; and units.
class OddNetImpl : public torch::nn::Module {
 public:
  static constexpr int64_t kColumns = 12;

  explicit OddNetImpl(int seed)
      : conv_(register_module(
            "conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 2)))),
        turned_(register_parameter("turned", at::empty({kWidth, 4}).t())),
        scale_(register_parameter("scale", at::empty({}))),
        empty_(register_parameter("empty", at::empty({0, 3}))),
        frozen_(register_parameter("frozen", at::empty({kWidth}), false)),
        unused_(register_parameter("unused", at::empty({3, 2}))),
        left_out_(register_parameter("left_out", at::empty({kWidth}))),
        ignored_(register_parameter("ignored", at::empty({kWidth}))),
        mean_(register_buffer("mean", at::zeros({2}))),
        count_(register_buffer("count", at::zeros({}, at::kLong))),
        blocks_(register_module("blocks", torch::nn::ModuleList())) {
    for (int i = 0; i < 2; ++i) {
      blocks_->push_back(std::make_shared<BlockImpl>(kWidth));
    }
    const c10::NoGradGuard no_grad;
    conv_->weight.set_data(
        conv_->weight.detach().to(at::MemoryFormat::ChannelsLast));
    FillParameters(*this, seed);
  }

  // [rows, kColumns] to [rows, kWidth].
  at::Tensor forward(const at::Tensor& x) {
    const auto dtype = scale_.scalar_type();
    {
      const c10::NoGradGuard no_grad;
      mean_.mul_(0.5).add_(x.sum().to(mean_.scalar_type()));
      count_.add_(x.size(0));
    }
    at::Tensor y =
        conv_->forward(x.to(dtype).view({-1, 3, 2, 2})).view({-1, 4});
    y = y.matmul(turned_) * scale_ + frozen_ + left_out_ + empty_.sum();
    y = y + ignored_.detach().to(dtype);
    for (const auto& block : *blocks_) y = Forward(*block->as<BlockImpl>(), y);
    return y;
  }

 private:
  static constexpr int64_t kWidth = 7;

  torch::nn::Conv2d conv_;
  at::Tensor turned_;
  at::Tensor scale_;
  at::Tensor empty_;
  at::Tensor frozen_;
  at::Tensor unused_;
  at::Tensor left_out_;
  at::Tensor ignored_;
  at::Tensor mean_;
  at::Tensor count_;
  torch::nn::ModuleList blocks_;
};

// `options` for OddNetImpl.
void IgnoreWhatIsIgnored(Options& options) {
  options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
    return name == "ignored";
  };
}

// Biases are a group of their own.
template <typename Optimizer, typename OptimizerOptions>
std::unique_ptr<torch::optim::Optimizer> WithGroups(
    const ShardedModuleBase& model, OptimizerOptions options) {
  std::vector<at::Tensor> biases;
  std::vector<at::Tensor> others;
  for (const TensorRange& named : model.Ranges()) {
    if (named.name == "left_out") continue;
    (absl::EndsWith(named.name, "bias") ? biases : others)
        .push_back(named.values);
  }
  OptimizerOptions of_biases = options;
  of_biases.lr(options.lr() / 2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::move(others),
                      std::make_unique<OptimizerOptions>(options));
  groups.emplace_back(std::move(biases),
                      std::make_unique<OptimizerOptions>(of_biases));
  return std::make_unique<Optimizer>(std::move(groups), options);
}

// Adagrad and RMSprop have no fused counterpart, and AdamW stands in.
std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(
    const ShardedModuleBase& model, OptimizerKind kind, bool fused) {
  namespace optim = torch::optim;
  if (kind == OptimizerKind::kSgd) {
    const auto options = optim::SGDOptions(0.05).momentum(0.9);
    return fused ? WithGroups<FusedSGD>(model, options)
                 : WithGroups<optim::SGD>(model, options);
  }
  if (kind == OptimizerKind::kAdam) {
    const auto options = optim::AdamOptions(0.01).amsgrad(true);
    return fused ? WithGroups<FusedAdam>(model, options)
                 : WithGroups<optim::Adam>(model, options);
  }
  if (kind == OptimizerKind::kAdagrad && !fused) {
    return WithGroups<optim::Adagrad>(
        model, optim::AdagradOptions(0.05).lr_decay(0.01));
  }
  if (kind == OptimizerKind::kRmsprop && !fused) {
    return WithGroups<optim::RMSprop>(
        model, optim::RMSpropOptions(0.005).centered(true).momentum(0.5));
  }
  const auto options = optim::AdamWOptions(0.01).weight_decay(0.1);
  return fused ? WithGroups<FusedAdamW>(model, options)
               : WithGroups<optim::AdamW>(model, options);
}

Options OptionsOf(const TrainingSetup& setup) {
  Options options;
  if (setup.units) options.wrap_policy = WrapModules<BlockImpl, LayerImpl>();
  options.unit.strategy = setup.strategy;
  if (setup.numbers == NumberKind::kMixed) {
    options.unit.precision = ComputeIn(at::kBFloat16);
  }
  if (setup.model == ModelKind::kOdd) IgnoreWhatIsIgnored(options);
  options.offload.parameters = setup.tier;
  options.offload.gradients = setup.tier;
  options.offload.optimizer = setup.tier;
  options.offload.optimizer_state = 3;
  options.offload.directory = setup.directory;
  return options;
}

// Level, choice, later level, choice.
using Pair = std::tuple<size_t, int, size_t, int>;

std::set<Pair> PairsOf(const std::vector<int>& row) {
  std::set<Pair> pairs;
  for (size_t i = 0; i < row.size(); ++i) {
    for (size_t j = i + 1; j < row.size(); ++j) {
      pairs.insert({i, row[i], j, row[j]});
    }
  }
  return pairs;
}

std::set<Pair> AllPairs(const std::vector<int>& levels) {
  std::set<Pair> pairs;
  for (size_t i = 0; i < levels.size(); ++i) {
    for (size_t j = i + 1; j < levels.size(); ++j) {
      for (int a = 0; a < levels[i]; ++a) {
        for (int b = 0; b < levels[j]; ++b) pairs.insert({i, a, j, b});
      }
    }
  }
  return pairs;
}

}  // namespace

std::vector<std::vector<int>> CoverPairs(const std::vector<int>& levels) {
  constexpr int kTries = 50;
  std::mt19937 random(1);
  std::set<Pair> missing = AllPairs(levels);
  std::vector<std::vector<int>> rows;
  while (!missing.empty()) {
    // The best of some rows that have the first missing pair.
    std::vector<int> best;
    size_t best_count = 0;
    for (int attempt = 0; attempt < kTries; ++attempt) {
      std::vector<int> row;
      row.reserve(levels.size());
      for (const int level : levels) {
        row.push_back(static_cast<int>(random() % level));
      }
      const auto& [i, a, j, b] = *missing.begin();
      row[i] = a;
      row[j] = b;
      size_t count = 0;
      for (const Pair& pair : PairsOf(row)) count += missing.count(pair);
      if (count <= best_count) continue;
      best = row;
      best_count = count;
    }
    for (const Pair& pair : PairsOf(best)) missing.erase(pair);
    rows.push_back(best);
  }
  return rows;
}

std::pair<TrainingSetup, TrainingSetup> SetupsOf(const SetupChoice& choice) {
  TrainingSetup before;
  before.model = static_cast<ModelKind>(choice.model);
  before.numbers = static_cast<NumberKind>(choice.numbers);
  before.optimizer = static_cast<OptimizerKind>(choice.optimizer);
  before.directory = choice.directory;
  before.fused = choice.tier != 0 || choice.other_tier != 0;
  TrainingSetup after = before;
  before.strategy = kStrategies[choice.strategy];
  before.tier = kTiers[choice.tier];
  after.strategy = kStrategies[choice.other_strategy];
  after.tier = kTiers[choice.other_tier];
  return {std::move(before), std::move(after)};
}

std::string ToString(const TrainingSetup& setup) {
  constexpr const char* kModels[] = {"toy", "transformer", "batch norm", "odd"};
  constexpr const char* kNumbers[] = {"float32", "bfloat16", "mixed"};
  constexpr const char* kOptimizers[] = {"SGD", "Adam", "AdamW", "Adagrad",
                                         "RMSprop"};
  return absl::StrCat(kModels[static_cast<int>(setup.model)], ", ",
                      kNumbers[static_cast<int>(setup.numbers)], ", ",
                      setup.fused ? "fused " : "",
                      kOptimizers[static_cast<int>(setup.optimizer)], ", ",
                      ToString(setup.strategy), ", ", ToString(setup.tier),
                      setup.units ? "" : ", one unit");
}

bool StepsElementsAlike(const TrainingSetup& setup) {
  return setup.numbers != NumberKind::kBFloat16 || setup.fused ||
         setup.optimizer == OptimizerKind::kAdagrad;
}

template <typename Net>
absl::Status ShardedTraining::Shard(comm::Communicator& world,
                                    std::shared_ptr<Net> net,
                                    const TrainingSetup& setup) {
  if (setup.numbers == NumberKind::kBFloat16) net->to(at::kBFloat16);
  const bool hybrid = setup.strategy == ShardingStrategy::kHybridShard ||
                      setup.strategy == ShardingStrategy::kHybridShardGradOp;
  FSDP_ASSIGN_OR_RETURN(
      const comm::Mesh mesh,
      hybrid
          ? fsdp::testing::MeshOf(world)
          : comm::Mesh::Create(fsdp::testing::Unowned(world), {{"shard", -1}}));
  FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<Net> model,
                        FullyShard(std::move(net), mesh, OptionsOf(setup)));
  const at::ScalarType dtype =
      setup.numbers == NumberKind::kBFloat16 ? at::kBFloat16 : at::kFloat;
  loss_ = [=](int64_t begin, int64_t rows) mutable {
    if constexpr (std::is_same_v<Net, TransformerImpl>) {
      return fsdp::testing::TransformerLoss(
          [&](const at::Tensor& x) { return model->forward(x).to(at::kFloat); },
          fsdp::testing::Sequences(begin, rows));
    } else {
      constexpr int64_t kColumns =
          std::is_same_v<Net, OddNetImpl> ? OddNetImpl::kColumns : kDim;
      const at::Tensor x = fsdp::testing::Rows(begin, rows, kColumns);
      return model->forward(x.to(dtype)).to(at::kFloat).square().mean();
    }
  };
  model_ = model.ptr();
  return absl::OkStatus();
}

absl::Status ShardedTraining::MakeModel(comm::Communicator& world,
                                        const TrainingSetup& setup, int seed) {
  if (setup.model == ModelKind::kToy) {
    return Shard(world, fsdp::testing::MakeNet(kDim, 2, seed), setup);
  }
  if (setup.model == ModelKind::kOdd) {
    return Shard(world, std::make_shared<OddNetImpl>(seed), setup);
  }
  ::fsdp::testing::ToyTransformerOptions options;
  options.batch_norm = setup.model == ModelKind::kBatchNorm;
  auto transformer = std::make_shared<TransformerImpl>(options);
  FillParameters(*transformer, seed);
  return Shard(world, std::move(transformer), setup);
}

absl::StatusOr<std::unique_ptr<ShardedTraining>> ShardedTraining::Make(
    comm::Communicator& world, const TrainingSetup& setup, int seed) {
  std::unique_ptr<ShardedTraining> training(new ShardedTraining);
  FSDP_RETURN_IF_ERROR(training->MakeModel(world, setup, seed));
  training->optimizer_ =
      MakeOptimizer(*training->model_, setup.optimizer, setup.fused);
  training->scheduler_ = std::make_unique<torch::optim::StepLR>(
      *training->optimizer_, /*step_size=*/3, /*gamma=*/0.8);
  // Finds no loss good enough, so that it lowers the rates every third step.
  training->plateau_ =
      std::make_unique<torch::optim::ReduceLROnPlateauScheduler>(
          *training->optimizer_, torch::optim::ReduceLROnPlateauScheduler::min,
          /*factor=*/0.9, /*patience=*/1, /*threshold=*/0.9);
  GradScalerOptions scaler;
  scaler.init_scale = 16;
  scaler.growth_interval = 3;
  if (setup.averages) {
    training->average_.emplace(training->model_->Parameters());
  }
  FSDP_ASSIGN_OR_RETURN(training->scaler_,
                        ShardedGradScaler::Create(world, scaler));
  return training;
}

absl::StatusOr<double> ShardedTraining::Step(int step) {
  comm::Communicator& world = model_->communicator();
  const int64_t rows = kRows / world.world_size();
  model_->zero_grad();
  const at::Tensor loss = loss_(step * kRows + world.rank() * rows, rows);
  FSDP_RETURN_IF_ERROR(model_->Backward(scaler_->Scale(loss)));
  FSDP_RETURN_IF_ERROR(scaler_->Step(*optimizer_, model_->Ranges()).status());
  FSDP_RETURN_IF_ERROR(scaler_->Update());
  if (average_) FSDP_RETURN_IF_ERROR(average_->Update(0.5));
  FSDP_ASSIGN_OR_RETURN(const double sum, fsdp::testing::SumOverRanks(
                                              world, loss.item<double>()));
  scheduler_->step();
  plateau_->step(static_cast<float>(sum / world.world_size()));
  return sum / world.world_size();
}

TrainingRun ShardedTraining::AsRun() {
  TrainingRun run;
  run.model = model_.get();
  run.optimizer = optimizer_.get();
  run.schedulers = {scheduler_.get()};
  run.plateau_schedulers = {plateau_.get()};
  run.scaler = &*scaler_;
  if (average_) run.average = &*average_;
  run.random_state = false;
  return run;
}

absl::StatusOr<Values> ShardedTraining::Gather() {
  Values values;
  FSDP_ASSIGN_OR_RETURN(const StateDict dict, model_->GatherStateDict());
  for (const auto& item : dict) values[item.key()] = item.value().clone();
  const int rank = model_->communicator().rank();
  if (rank != 0) {
    for (const auto& item : Buffers()) values.erase(item.first);
  }
  FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict state,
                        model_->GatherOptimizerState(*optimizer_));
  for (const auto& item : state.tensors) {
    values[item.key()] = item.value().clone();
  }
  for (const auto& [name, number] : state.numbers) {
    values[name] = at::scalar_tensor(number, at::kLong);
  }
  const auto gather_average = [&]() -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const StateDict average, model_->GatherStateDict());
    for (const auto& item : average) {
      if (Buffers().count(item.key()) > 0) continue;
      values["average of " + item.key()] = item.value().clone();
    }
    return absl::OkStatus();
  };
  if (average_) FSDP_RETURN_IF_ERROR(average_->InModel(gather_average));
  int group = 0;
  for (torch::optim::OptimizerParamGroup& one : optimizer_->param_groups()) {
    values[absl::StrCat("rate of group ", group++)] =
        at::scalar_tensor(one.options().get_lr(), at::kDouble);
  }
  values["scale"] = at::scalar_tensor(scaler_->scale());
  values["growth"] = at::scalar_tensor(scaler_->state().growth_tracker);
  return values;
}

Values ShardedTraining::Buffers() const {
  Values values;
  for (const auto& item : model_->children().front()->named_buffers()) {
    values[item.key()] = item.value().clone();
  }
  return values;
}

absl::Status Meet(comm::Communicator& world) {
  return comm::Barrier(world, "meet", absl::Now() + absl::Seconds(30));
}

absl::Status CheckLatest(comm::Communicator& world, Checkpointer& checkpoints,
                         const TrainingSetup& setup, int64_t step,
                         const Values& values) {
  FSDP_ASSIGN_OR_RETURN(const auto training,
                        ShardedTraining::Make(world, setup, /*seed=*/5));
  TrainingRun run = training->AsRun();
  FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> latest,
                        checkpoints.LoadLatest(run));
  FSDP_RETURN_IF_ERROR(CheckThat(latest, ::testing::Optional(step), "step"));
  FSDP_ASSIGN_OR_RETURN(const Values loaded, training->Gather());
  return CheckEqual(loaded, values);
}

}  // namespace fsdp::checkpoint::testing
