// Training whose gathers and sums send int8.
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/sgd.h>

#include <cmath>

#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

using Net = FullyShardedDataParallel<NetImpl>;

constexpr int64_t kDim = 11;

constexpr int kBlocks = 3;

Quantization Both() {
  Quantization quantization;
  quantization.gather = quantization.reduce = true;
  quantization.block = 32;
  return quantization;
}

Options Quantized(Options options = BlockUnits()) {
  options.quantize = Both();
  return options;
}

absl::StatusOr<TaskRecord> Train(Communicator& world, const Options& options,
                                 const TrainingTask& task) {
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
  FSDP_ASSIGN_OR_RETURN(Net model,
                        FullyShard(MakeNet(kDim, kBlocks), mesh, options));
  return RunSharded(task, model);
}

// Momentum magnifies errors of one sign, so there must be none.
TrainingTask LongTraining() {
  TrainingTask task = ToyTask(kDim);
  task.steps = 30;
  task.optimizer = Sgd();
  return task;
}

absl::Status ExpectSame(Communicator& world, const Options& options,
                        const Options& expected) {
  const TrainingTask task = LongTraining();
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, Train(world, options, task));
  FSDP_ASSIGN_OR_RETURN(const TaskRecord record, Train(world, expected, task));
  return CheckSameRecord(actual, record, 0, 0);
}

struct Setting {
  const char* name;
  bool gather;
  bool reduce;
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  bool mixed = false;
  int backwards = 1;
};

class QuantizedTrainingTest
    : public ::testing::TestWithParam<std::tuple<Setting, int>> {};

// A block's int8 step is 1/127 of its largest number, about 0.3 for parameters.
// Each training step rounds by at most half of it, up as often as down, so that
// errors grow with the square root of the number of steps.
constexpr double kRelative = 0.03;
const double kAbsolute = 0.3 / 127 / 2 * std::sqrt(LongTraining().steps);

TEST_P(QuantizedTrainingTest, ConvergesAsExactTrainingDoes) {
  const auto& [setting, world_size] = GetParam();
  EXPECT_OK(RunAllRanks(
      world_size, [&, &setting = setting](Communicator& world) -> absl::Status {
        TrainingTask task = LongTraining();
        task.backwards = setting.backwards;
        Options options = BlockUnits();
        options.unit.strategy = setting.strategy;
        if (setting.mixed) options.unit.precision = ComputeIn(at::kBFloat16);
        FSDP_ASSIGN_OR_RETURN(const auto exact, Train(world, options, task));
        options.quantize = Both();
        options.quantize.gather = setting.gather;
        options.quantize.reduce = setting.reduce;
        FSDP_ASSIGN_OR_RETURN(const auto actual, Train(world, options, task));
        FSDP_RETURN_IF_ERROR(
            CheckSameRecord(actual, exact, kRelative, kAbsolute));
        EXPECT_LE(actual.losses.back(), actual.losses.front() / 2);
        // A difference shows that int8 was sent.
        const bool same = CheckSameRecord(actual, exact, 0, 0).ok();
        return Check(same == (world.world_size() == 1),
                     same ? "exact" : "quantised alone");
      }));
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedTrainingTest,
    ::testing::Combine(
        ::testing::Values(
            Setting{"Gathers", true, false}, Setting{"Sums", false, true},
            Setting{"Both", true, true},
            Setting{"ShardGradOp", true, true, ShardingStrategy::kShardGradOp},
            Setting{"ShardOptimizerNoSync", true, true,
                    ShardingStrategy::kShardOptimizer, false, 3},
            Setting{"Hybrid", true, true, ShardingStrategy::kHybridShard},
            Setting{"InBFloat16", true, true, ShardingStrategy::kFullShard,
                    true}),
        ::testing::Values(1, 2, 3, 4)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param).name, "Of",
                          std::get<1>(info.param));
    });

TEST(QuantizedTrainingTest, SmallUnitsReplicatedOnesAndUserHooksAreExact) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options small = Quantized();
    small.quantize.min_bytes = int64_t{1} << 30;
    FSDP_RETURN_IF_ERROR(ExpectSame(world, small, BlockUnits()));
    Options replicated = BlockUnits();
    replicated.unit.strategy = ShardingStrategy::kNoShard;
    return ExpectSame(world, Quantized(replicated), replicated);
  }));
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    TrainingTask task = LongTraining();
    task.prepare = [](ShardedModuleBase& model) {
      return model.SetReductionHooks(CompressedReduceScatter(at::kBFloat16));
    };
    Options sums = Quantized();
    sums.quantize.gather = false;
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, Train(world, sums, task));
    FSDP_ASSIGN_OR_RETURN(const TaskRecord expected,
                          Train(world, BlockUnits(), task));
    return CheckSameRecord(actual, expected, 0, 0);
  }));
}

TEST(QuantizedTrainingTest, ASmallerGroupGivesBackwardWhatForwardHad) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    Options grouped = Quantized();
    grouped.unit.backward_group_size = 2;
    grouped.reshard_root_after_forward = true;
    return ExpectSame(world, grouped, Quantized());
  }));
}

absl::StatusOr<TaskRecord> TrainOn(
    const std::vector<std::unique_ptr<Communicator>>& group,
    const Options& options) {
  TaskRecord record;
  FSDP_RETURN_IF_ERROR(
      AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(auto own, Train(world, options, LongTraining()));
        if (world.rank() == 0) record = std::move(own);
        return absl::OkStatus();
      })));
  return record;
}

TEST(QuantizedSharedMemoryTest, GivesTheBitsOfRanksThatShareNone) {
  for (const bool gather : {false, true}) {
    Options options = Quantized();
    options.quantize.gather = gather;
    ASSERT_OK_AND_ASSIGN(const auto sharing, CreateSharedMemoryGroup(2));
    ASSERT_OK_AND_ASSIGN(const TaskRecord shared, TrainOn(sharing, options));
    ASSERT_OK_AND_ASSIGN(const auto local, comm::CreateLocalGroup(2));
    ASSERT_OK_AND_ASSIGN(const TaskRecord apart, TrainOn(local, options));
    EXPECT_OK(CheckSameRecord(shared, apart, 0, 0));
  }
}

TEST(QuantizedSharedMemoryTest, ParametersAreSharedUnlessGathersAreQuantised) {
  for (const bool gather : {false, true}) {
    EXPECT_OK(RunSharing(2, [&](Communicator& world) -> absl::Status {
      Options options = Quantized();
      options.quantize.gather = gather;
      FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                                  Unowned(world), options));
      return Check((model->PlanMemory().gathered > 0) == gather,
                   model->Describe());
    }));
  }
}

absl::Status TrainSteps(Net& model, int steps) {
  const at::Tensor x = Rows(int64_t{4} * model->communicator().rank(), 4, kDim);
  torch::optim::SGD optimizer(model->Parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    optimizer.step();
  }
  return absl::OkStatus();
}

absl::Status ExpectShardsOf(const StateDict& dict, Net& model) {
  for (const TensorRange& named : model->Ranges()) {
    const at::Tensor* const whole = dict.find(named.name);
    if (whole == nullptr) return absl::InternalError(named.name);
    const at::Tensor part = OwnPart(named, whole->contiguous());
    EXPECT_TRUE(at::equal(part, named.values.detach()))
        << named.name << " is not what the shard holds";
  }
  return absl::OkStatus();
}

TEST(QuantizedStateDictTest, HoldsTheShardsOwnValues) {
  for (const int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                                  Unowned(world), Quantized()));
      FSDP_RETURN_IF_ERROR(TrainSteps(model, 2));
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, model->GatherStateDict());
      FSDP_RETURN_IF_ERROR(ExpectShardsOf(dict, model));
      FSDP_RETURN_IF_ERROR(TrainSteps(model, 1));
      FSDP_RETURN_IF_ERROR(model->LoadStateDict(dict));
      return ExpectShardsOf(dict, model);
    }));
  }
}

// One unit has many parameters and one has few, so that exact parts differ in
// size.
class BranchImpl : public torch::nn::Module {
 public:
  explicit BranchImpl(int layers)
      : layers(register_module("layers", torch::nn::ModuleList())) {
    for (int i = 0; i < layers; ++i) {
      this->layers->push_back(Linear(kWidth, kWidth));
    }
  }
  // Nobody uses the last layer; the one before it is used if told so.
  at::Tensor forward(at::Tensor x) {
    const int used = static_cast<int>(layers->size()) - (uses_rare ? 1 : 2);
    for (int i = 0; i < used; ++i) {
      x = at::tanh(layers[i]->as<Linear>()->forward(x));
    }
    return x;
  }
  static constexpr int64_t kWidth = 8;
  torch::nn::ModuleList layers;
  bool uses_rare = false;
};

class TreeImpl : public torch::nn::Module {
 public:
  explicit TreeImpl(bool uses_rare)
      : wide(register_module("wide", std::make_shared<BranchImpl>(20))),
        narrow(register_module("narrow", std::make_shared<BranchImpl>(3))) {
    wide->uses_rare = narrow->uses_rare = uses_rare;
  }
  at::Tensor forward(const at::Tensor& x) {
    return Forward(*narrow, Forward(*wide, x));
  }
  std::shared_ptr<BranchImpl> wide;
  std::shared_ptr<BranchImpl> narrow;
};

// Next to such gradients, a flag would vanish in a block.
TEST(QuantizedGradientsTest, OnlyParametersThatARankUsedHaveOne) {
  for (const int world_size : {2, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& world) -> absl::Status {
      Options options = Quantized();
      options.wrap_policy = WrapModules<BranchImpl>();
      options.quantize.block = 256;
      FSDP_ASSIGN_OR_RETURN(
          auto model, FullyShard(std::make_shared<TreeImpl>(world.rank() == 0),
                                 Unowned(world), options));
      const at::Tensor x = Rows(0, 4, BranchImpl::kWidth);
      FSDP_RETURN_IF_ERROR(model->Backward(model->forward(x).sum() * 1e9));
      for (const TensorRange& named : model->Ranges()) {
        const bool never = absl::StrContains(named.name, "wide.layers.19.") ||
                           absl::StrContains(named.name, "narrow.layers.2.");
        EXPECT_NE(named.values.grad().defined(), never) << named.name;
      }
      return absl::OkStatus();
    }));
  }
}

absl::StatusOr<MemoryPlan> PlanOf(Communicator& world,
                                  const Quantization& quantization,
                                  std::string* description) {
  Options options;
  options.quantize = quantization;
  Linear linear(torch::nn::LinearOptions(64, 64).bias(false));
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(linear, Unowned(world), options));
  *description = model->Describe();
  return model->PlanMemory();
}

// Each of two ranks sends 2048 numbers as bytes and a scale for each 256; sums
// also have 16 bytes of a flag, sent and received.
TEST(QuantizedMemoryTest, MessagesAreInThePlanAndTheDescription) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Quantization quantization;
    std::string text;
    FSDP_ASSIGN_OR_RETURN(MemoryPlan plan, PlanOf(world, quantization, &text));
    EXPECT_TRUE(plan.messages == 0 && !absl::StrContains(text, "int8")) << text;
    quantization.gather = true;
    FSDP_ASSIGN_OR_RETURN(plan, PlanOf(world, quantization, &text));
    EXPECT_TRUE(plan.messages == int64_t{2} * (2048 + 8 * 4) &&
                absl::StrContains(text, " int8 gathers\n"))
        << text;
    quantization.reduce = true;
    FSDP_ASSIGN_OR_RETURN(plan, PlanOf(world, quantization, &text));
    EXPECT_TRUE(plan.messages == int64_t{4} * (2048 + 8 * 4 + 16) &&
                absl::StrContains(text, " int8 gathers and sums\n") &&
                absl::StrContains(text, "quantised messages, at most"))
        << text;
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
