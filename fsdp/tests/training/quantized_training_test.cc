// Training whose gathers and sums send int8.
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/call.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/mesh.h"
#include "comm/quantized/quantization_log.h"
#include "comm/testing/run_ranks.h"
#include "comm/testing/shared_memory_group.h"
#include "comm/wrappers/recording_communicator.h"
#include "fsdp/comm_hooks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"
#include "fsdp/options/quantization.h"
#include "fsdp/testing/plain_oracle.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::CollectiveLog;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::Mesh;
using ::fsdp::comm::QuantizationLog;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::CreateSharedMemoryGroup;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::BlockImpl;
using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::CheckSameTraining;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::TrainingPlan;
using ::fsdp::testing::TrainingRecord;
using ::fsdp::testing::TrainSharded;
using ::fsdp::testing::Unowned;
using ::testing::HasSubstr;

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

absl::StatusOr<TrainingRecord> Train(Communicator& world,
                                     const Options& options,
                                     const TrainingPlan& plan) {
  const int row = world.world_size() % 2 == 0 ? 2 : world.world_size();
  FSDP_ASSIGN_OR_RETURN(
      const Mesh mesh,
      Mesh::Create(Unowned(world), {{"replicate", -1}, {"shard", row}}));
  TrainingRecord record;
  FSDP_RETURN_IF_ERROR(TrainSharded(plan, mesh, options, &record));
  return record;
}

// Momentum makes errors of one sign grow: none may be.
TrainingPlan LongTraining() {
  TrainingPlan plan;
  plan.dim = kDim;
  plan.blocks = kBlocks;
  plan.steps = 30;
  plan.adam = false;
  return plan;
}

absl::Status ExpectSame(Communicator& world, const Options& options,
                        const Options& expected) {
  const TrainingPlan plan = LongTraining();
  FSDP_ASSIGN_OR_RETURN(const TrainingRecord actual,
                        Train(world, options, plan));
  FSDP_ASSIGN_OR_RETURN(const TrainingRecord record,
                        Train(world, expected, plan));
  return CheckSameTraining(actual, record, 0, 0);
}

// --- What is learned ---------------------------------------------------------

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

// The int8 step of a block is 1/127 of its largest number, which is about 0.3
// for parameters. In shards, which are exact, no more than two are left of 30
// steps with momentum.
constexpr double kRelative = 0.03;
constexpr double kAbsolute = 2 * 0.3 / 127;

TEST_P(QuantizedTrainingTest, ConvergesAsExactTrainingDoes) {
  const auto& [setting, world_size] = GetParam();
  EXPECT_OK(RunAllRanks(
      world_size, [&, &setting = setting](Communicator& world) -> absl::Status {
        TrainingPlan plan = LongTraining();
        plan.backwards = setting.backwards;
        plan.no_sync = true;
        Options options = BlockUnits();
        options.unit.strategy = setting.strategy;
        if (setting.mixed) options.unit.precision = ComputeIn(at::kBFloat16);
        FSDP_ASSIGN_OR_RETURN(const TrainingRecord exact,
                              Train(world, options, plan));
        options.quantize = Both();
        options.quantize.gather = setting.gather;
        options.quantize.reduce = setting.reduce;
        FSDP_ASSIGN_OR_RETURN(const TrainingRecord actual,
                              Train(world, options, plan));
        FSDP_RETURN_IF_ERROR(
            CheckSameTraining(actual, exact, kRelative, kAbsolute));
        if (actual.losses.back() > actual.losses.front() / 2) {
          return absl::InternalError("nothing was learned");
        }
        // What is off shows that int8 was sent.
        const bool same = CheckSameTraining(actual, exact, 0, 0).ok();
        return same == (world.world_size() == 1)
                   ? absl::OkStatus()
                   : absl::InternalError(same ? "exact" : "quantised alone");
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
    TrainingPlan plan = LongTraining();
    plan.prepare = [](ShardedModuleBase& model) {
      return model.SetReductionHooks(CompressedReduceScatter(at::kBFloat16));
    };
    Options sums = Quantized();
    sums.quantize.gather = false;
    FSDP_ASSIGN_OR_RETURN(const TrainingRecord actual,
                          Train(world, sums, plan));
    FSDP_ASSIGN_OR_RETURN(const TrainingRecord expected,
                          Train(world, BlockUnits(), plan));
    return CheckSameTraining(actual, expected, 0, 0);
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

absl::Status TrainOneStep(Net& model, torch::optim::Optimizer& optimizer) {
  const at::Tensor x = Rows(model->communicator().rank() * 4, 4, kDim);
  optimizer.zero_grad();
  FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
  optimizer.step();
  return absl::OkStatus();
}

absl::Status TrainSteps(Net& model, int steps) {
  torch::optim::SGD optimizer(model->Parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    FSDP_RETURN_IF_ERROR(TrainOneStep(model, optimizer));
  }
  return absl::OkStatus();
}

// --- What is exact, and what all ranks have alike ----------------------------

// What ranks compute with, unit after unit, and what they rest with.
struct Parameters {
  std::vector<at::Tensor> computed;
  std::vector<at::Tensor> full;
};

absl::StatusOr<Parameters> ReadParameters(Net& model) {
  Parameters result;
  FSDP_ASSIGN_OR_RETURN(const std::vector<RebuiltParameter> rebuilt,
                        model->RebuildFullParams());
  for (const RebuiltParameter& unit : rebuilt) {
    result.computed.push_back(unit.flat.detach().clone());
  }
  for (size_t i = 0; i < rebuilt.size(); ++i) {
    // The root first, which is the model's own; blocks by themselves.
    FSDP_RETURN_IF_ERROR(
        i == 0 ? Reshard(*model->module())
               : Reshard(*model->module()->blocks[static_cast<int>(i) - 1]));
  }
  FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
      [&](const std::string& /*name*/, const at::Tensor& value) {
        result.full.push_back(value.clone());
        return absl::OkStatus();
      }));
  return result;
}

bool Same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(),
      [](const at::Tensor& x, const at::Tensor& y) { return at::equal(x, y); });
}

TEST(QuantizedParametersTest, AreTheSameBitsOnAllRanks) {
  for (const int world_size : {2, 3}) {
    std::vector<Parameters> parameters(world_size);
    ASSERT_OK(RunAllRanks(world_size, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                                  Unowned(world), Quantized()));
      FSDP_RETURN_IF_ERROR(TrainSteps(model, 3));
      FSDP_ASSIGN_OR_RETURN(parameters[world.rank()], ReadParameters(model));
      return absl::OkStatus();
    }));
    EXPECT_EQ(parameters[0].computed.size(), 1u + kBlocks);
    EXPECT_EQ(parameters[0].full.size(), 4u + 4 * kBlocks);
    for (int rank = 1; rank < world_size; ++rank) {
      EXPECT_TRUE(Same(parameters[rank].computed, parameters[0].computed));
      EXPECT_TRUE(Same(parameters[rank].full, parameters[0].full));
    }
  }
}

absl::Status ExpectShardsOf(const StateDict& dict, Net& model) {
  for (const NamedShard& named : model->NamedShards()) {
    const at::Tensor* const whole = dict.find(named.name);
    if (whole == nullptr) return absl::InternalError(named.name);
    const at::Tensor part = whole->contiguous().view({-1}).narrow(
        0, named.begin, named.shard.numel());
    if (!at::equal(part, named.shard.detach())) {
      return absl::InternalError(
          absl::StrCat(named.name, " is not what the shard holds"));
    }
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

// One unit with many parameters and one with few, so that what has to stay
// exact is of different sizes.
class BranchImpl : public torch::nn::Module {
 public:
  explicit BranchImpl(int layers)
      : layers(register_module("layers", torch::nn::ModuleList())) {
    for (int i = 0; i < layers; ++i) {
      this->layers->push_back(torch::nn::Linear(kWidth, kWidth));
    }
  }
  // The last layer is used by nobody, the one before it where told so.
  at::Tensor forward(at::Tensor x) {
    const int used = static_cast<int>(layers->size()) - (uses_rare ? 1 : 2);
    for (int i = 0; i < used; ++i) {
      x = at::tanh(layers[i]->as<torch::nn::Linear>()->forward(x));
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

// Next to gradients like these a flag is nothing in a block.
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
      for (const NamedShard& named : model->NamedShards()) {
        const bool never = absl::StrContains(named.name, "wide.layers.19.") ||
                           absl::StrContains(named.name, "narrow.layers.2.");
        if (named.shard.grad().defined() == never) {
          return absl::InternalError(absl::StrCat(
              named.name, never ? " has a" : " lacks its", " gradient"));
        }
      }
      return absl::OkStatus();
    }));
  }
}

// --- What it costs, and what one is told -------------------------------------

TEST(QuantizationLogTest, HoldsWhatEachUnitLost) {
  constexpr int kRanks = 3;
  constexpr int kSteps = 2;
  QuantizationLog log;
  Options options = Quantized();
  options.unit.strategy = ShardingStrategy::kShardGradOp;
  options.quantize.log = &log;
  ASSERT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        Net model, FullyShard(MakeNet(kDim, kBlocks), Unowned(world), options));
    return TrainSteps(model, kSteps);
  }));
  for (const char* unit : {"root", "blocks.0", "blocks.1", "blocks.2"}) {
    const auto gathers = log.TotalsOf(Collective::kAllGather, unit);
    const auto sums = log.TotalsOf(Collective::kReduceScatter, unit);
    EXPECT_EQ(gathers.count, kRanks * kSteps) << unit;
    EXPECT_EQ(sums.count, kRanks * kSteps) << unit;
    EXPECT_GT(gathers.error.relative_l2(), 0) << unit;
    EXPECT_LT(gathers.error.relative_l2(), 0.01) << unit;
    EXPECT_GT(sums.error.relative_l2(), 0) << unit;
    EXPECT_LT(sums.error.relative_l2(), 0.02) << unit;
  }
}

struct Sent {
  int64_t gathered = 0;
  int64_t reduced = 0;
};

// Of three steps of rank 0, without what sharding takes.
absl::StatusOr<Sent> SentBy(const Options& options) {
  FSDP_ASSIGN_OR_RETURN(auto group, comm::CreateLocalGroup(2));
  CollectiveLog log;
  group[0] = comm::Record(std::move(group[0]), &log);
  FSDP_RETURN_IF_ERROR(AllOk(RunRanks(group, [&](Communicator& world) {
    const auto run = [&]() -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(64, kBlocks),
                                                   Unowned(world), options));
      if (world.rank() == 0) log.Clear();
      for (int step = 0; step < 3; ++step) {
        const at::Tensor x = Rows(0, 4, 64);
        FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
      }
      return absl::OkStatus();
    };
    return run();
  })));
  return Sent{log.TotalsOf(Collective::kAllGather).bytes,
              log.TotalsOf(Collective::kReduceScatter).bytes +
                  log.TotalsOf(Collective::kAllToAll).bytes};
}

TEST(QuantizedBytesTest, AreAboutAQuarter) {
  ASSERT_OK_AND_ASSIGN(const Sent exact, SentBy(BlockUnits()));
  Options options = BlockUnits();
  options.quantize.gather = options.quantize.reduce = true;
  ASSERT_OK_AND_ASSIGN(const Sent quantized, SentBy(options));
  EXPECT_GT(quantized.gathered, exact.gathered / 4);
  EXPECT_LT(quantized.gathered, exact.gathered * 0.26);
  EXPECT_GT(quantized.reduced, exact.reduced / 4);
  EXPECT_LT(quantized.reduced, exact.reduced * 0.27);
}

absl::StatusOr<MemoryPlan> PlanOf(Communicator& world,
                                  const Quantization& quantization,
                                  std::string* description) {
  Options options;
  options.quantize = quantization;
  torch::nn::Linear linear(torch::nn::LinearOptions(64, 64).bias(false));
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(linear, Unowned(world), options));
  *description = model->Describe();
  return model->PlanMemory();
}

// 2048 numbers of each of two ranks: as many bytes, a scale for each 256, and
// with a sum the 16 bytes of a flag, sent and received.
TEST(QuantizedMemoryTest, MessagesAreInThePlanAndTheDescription) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Quantization quantization;
    std::string text;
    FSDP_ASSIGN_OR_RETURN(MemoryPlan plan, PlanOf(world, quantization, &text));
    if (plan.messages != 0 || absl::StrContains(text, "int8")) {
      return absl::InternalError(text);
    }
    quantization.gather = true;
    FSDP_ASSIGN_OR_RETURN(plan, PlanOf(world, quantization, &text));
    if (plan.messages != 2 * (2048 + 8 * 4) ||
        !absl::StrContains(text, " int8 gathers\n")) {
      return absl::InternalError(text);
    }
    quantization.reduce = true;
    FSDP_ASSIGN_OR_RETURN(plan, PlanOf(world, quantization, &text));
    if (plan.messages != 4 * (2048 + 8 * 4 + 16) ||
        !absl::StrContains(text, " int8 gathers and sums\n") ||
        !absl::StrContains(text, "quantised messages, at most")) {
      return absl::InternalError(text);
    }
    return absl::OkStatus();
  }));
}

// --- Ranks of one host, and refusals -----------------------------------------

absl::StatusOr<TrainingRecord> TrainOn(
    const std::vector<std::unique_ptr<Communicator>>& group,
    const Options& options) {
  TrainingRecord record;
  FSDP_RETURN_IF_ERROR(
      AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(TrainingRecord own,
                              Train(world, options, LongTraining()));
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
    ASSERT_OK_AND_ASSIGN(const TrainingRecord shared,
                         TrainOn(sharing, options));
    ASSERT_OK_AND_ASSIGN(const auto local, comm::CreateLocalGroup(2));
    ASSERT_OK_AND_ASSIGN(const TrainingRecord apart, TrainOn(local, options));
    EXPECT_OK(CheckSameTraining(shared, apart, 0, 0));
  }
}

TEST(QuantizedSharedMemoryTest, ParametersAreSharedUnlessGathersAreQuantised) {
  for (const bool gather : {false, true}) {
    ASSERT_OK_AND_ASSIGN(const auto group, CreateSharedMemoryGroup(2));
    EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
      Options options = Quantized();
      options.quantize.gather = gather;
      FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                                  Unowned(world), options));
      return (model->PlanMemory().gathered > 0) == gather
                 ? absl::OkStatus()
                 : absl::InternalError(model->Describe());
    })));
  }
}

TEST(QuantizeOptionTest, IsRefusedByAllRanksWhereItMakesNoSense) {
  for (const absl::Status& status : RunRanks(2, [](Communicator& world) {
         Options options = Quantized();
         options.quantize.block = world.rank();
         return FullyShard(MakeNet(kDim, 1), Unowned(world), options).status();
       })) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("a block of 0 numbers")));
  }
}

TEST(QuantizeOptionTest, IsTheSameOnAllRanks) {
  for (const absl::Status& status : RunRanks(2, [](Communicator& world) {
         Options options = BlockUnits();
         options.quantize.gather = true;
         options.quantize.block = 32 * (1 + world.rank());
         return FullyShard(MakeNet(kDim, 1), Unowned(world), options).status();
       })) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("gathers in blocks of 64")));
  }
}

}  // namespace
}  // namespace fsdp
