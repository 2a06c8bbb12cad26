// Checkpointed regions around and inside units: gradients have the bits of the
// same model without regions, also if arguments are offloaded, and no
// collective is added. Recomputations leave no changes in buffers.
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>

#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/trained_values.h"
#include "fsdp/tests/autograd/checkpoint_scenario.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing {
namespace {

// Uses some of the unit's parameters outside the region, others inside.
at::Tensor LayerPartlyInARegion(Layer& layer, const at::Tensor& x) {
  const at::Tensor y = at::tanh(layer.fc->forward(x));
  return x +
         Region([&](const at::Tensor& y) { return layer.out->forward(y); }, y);
}

// The input has no gradient: the first region has only its parameters'.
at::Tensor EachLayerInARegionFromTheInput(Net& net, const at::Tensor& x) {
  at::Tensor y = x;
  for (const auto& layer : net.layers) {
    y = Region([&](const at::Tensor& y) { return Forward(layer, y); }, y);
  }
  return y;
}

at::Tensor AllLayersInOneRegion(Net& net, const at::Tensor& x) {
  return Region([&](const at::Tensor& x) { return EachLayer(net, x); }, x);
}

at::Tensor FirstLayerTwiceInTwoRegions(Net& net, const at::Tensor& x) {
  const auto use = [&](const at::Tensor& y) {
    return Forward(net.layers[0], y);
  };
  return Region(use, at::tanh(Region(use, net.embed->forward(x))));
}

at::Tensor FirstLayerTwiceInOneRegion(Net& net, const at::Tensor& x) {
  return Region(
      [&](const at::Tensor& y) {
        return Forward(net.layers[0], at::tanh(Forward(net.layers[0], y)));
      },
      net.embed->forward(x));
}

at::Tensor FirstLayerTwice(Net& net, const at::Tensor& x) {
  const at::Tensor y = Forward(net.layers[0], net.embed->forward(x));
  return Forward(net.layers[0], at::tanh(y));
}

// Gradients add up over the steps.
absl::Status RunScenario(const Scenario& scenario, CollectiveLog& log,
                         Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, world));
  FSDP_ASSIGN_OR_RETURN(auto without_regions, ShardNet(scenario, world));
  for (int step = 0; step < 2; ++step) {
    regions_are_on = false;
    const at::Tensor expected = LossOf(*without_regions.get(), step);
    FSDP_RETURN_IF_ERROR(without_regions->Backward(expected));
    regions_are_on = true;
    log.Clear();
    const at::Tensor loss = LossOf(*model.get(), step);
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    // A single rank has everything.
    if (world.world_size() > 1) {
      FSDP_RETURN_IF_ERROR(CheckCounts(log, scenario));
    }
    FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
    FSDP_RETURN_IF_ERROR(CheckGradients(*model, *without_regions));
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after backward"));
    if (scenario.ignored.empty()) continue;
    const auto gradient_in = [&](Net& net) {
      return net.named_parameters()[scenario.ignored].grad();
    };
    FSDP_RETURN_IF_ERROR(CheckTensor(gradient_in(*model.module()),
                                     gradient_in(*without_regions.module()),
                                     scenario.ignored));
  }
  return absl::OkStatus();
}

class CheckpointUnitsTest : public ::testing::TestWithParam<Scenario> {};

TEST_P(CheckpointUnitsTest, SameGradientsAndNoMoreCollectives) {
  for (int world_size : {1, 2, 3}) {
    SCOPED_TRACE(world_size);
    RecordedRanks ranks(world_size);
    EXPECT_OK(AllOk(RunRanks(ranks.group, [&](Communicator& world) {
      return RunScenario(GetParam(), ranks.logs[world.rank()], world);
    })));
  }
}

void Freeze(torch::nn::Module& module) {
  for (at::Tensor& parameter : module.parameters()) {
    parameter.set_requires_grad(false);
  }
}
void FreezeFirst(Net& net) { Freeze(*net.layers[0]); }
void FreezeSecond(Net& net) { Freeze(*net.layers[1]); }
void FreezeFirstAndRoot(Net& net) {
  Freeze(*net.layers[0]);
  Freeze(*net.head);
  Freeze(*net.embed);
}
void FreezeAllButABias(Net& net) {
  Freeze(net);
  net.layers[0]->out->bias.set_requires_grad(true);
}
void FreezeNothing(Net&) {}

at::Tensor LayersInOneRegion(Net& net, const at::Tensor& x) {
  return Region(
      [&](at::Tensor y) {
        for (const auto& layer : net.layers) y = Forward(layer, y);
        return y;
      },
      x);
}

std::vector<Scenario> Scenarios() {
  const std::vector<Counts> twice = {{4, 2}, kNone, kNone};
  const std::vector<Counts> kept = {{1, 1}, {1, 1}, {1, 1}};
  constexpr auto kKept = ShardingStrategy::kShardGradOp;
  constexpr auto kFreed = ShardingStrategy::kFullShard;
  const std::vector<Counts> second_passes_on = {
      kUnitCounts, {2, 0}, kUnitCounts};
  return {
      {"AroundOneUnitEach", WholeLayer, EachLayerInARegion},
      {"AroundOneUnitEachWithoutGradOfTheInput", WholeLayer,
       EachLayerInARegionFromTheInput},
      {"AroundSeveralUnitsAndTheRootsOwn", WholeLayer, AllLayersInOneRegion},
      {"NestedAroundUnits", WholeLayer, LayersInNestedRegions},
      {"AroundAUnitUsedInTwoRegions", WholeLayer, FirstLayerTwiceInTwoRegions,
       kRootCounts, twice},
      {"AroundAUnitUsedTwiceInOneRegion", WholeLayer,
       FirstLayerTwiceInOneRegion, kRootCounts, twice},
      {"AroundUnitsKeptAfterForward", WholeLayer, EachLayerInARegion,
       kRootCounts, kept, FreezeNothing, kKept},
      {"InsideAUnitOneRegion", LayerInOneRegion, EachLayer},
      {"InsideAUnitThreeRegions", LayerInThreeRegions, EachLayer},
      {"InsideAUnitAPartOfIt", LayerPartlyInARegion, EachLayer},
      {"AroundAUnitWithOneInside", LayerInOneRegion, EachLayerInARegion},
      {"AroundSeveralUnitsWithThreeInside", LayerInThreeRegions,
       AllLayersInOneRegion},
      {"NestedAroundUnitsWithAPartInside", LayerPartlyInARegion,
       LayersInNestedRegions},
      {"InsideAUnitUsedTwice", LayerInThreeRegions, FirstLayerTwice,
       kRootCounts, twice},
      {"InsideUnitsKeptAfterForward", LayerInOneRegion, EachLayer, kRootCounts,
       kept, FreezeNothing, kKept},
      {"FrozenUnitThatPassesAGradientOn", WholeLayer, EachLayerInARegion,
       kRootCounts, second_passes_on, FreezeSecond},
      {"FrozenUnitWithARegionInside", LayerInOneRegion, EachLayer, kRootCounts,
       second_passes_on, FreezeSecond},
      // The unit is computed once, because nothing in it needs a gradient. The
      // root owns nothing that is used before it.
      {"FrozenUnitThatNoGradientReaches",
       WholeLayer,
       EachLayerInARegionFromTheInput,
       {1, 0},
       {{1, 0}, kUnitCounts, kUnitCounts},
       FreezeFirstAndRoot},
      {"FrozenUnitBeforeATrainableOneInARegion",
       WholeLayer,
       LayersInOneRegion,
       kRootCounts,
       {{2, 0}, kUnitCounts, kUnitCounts},
       FreezeFirst},
      // An ignored parameter is trained, and those of units are frozen.
      {"IgnoredParameterOfAFrozenUnit",
       WholeLayer,
       EachLayerInARegionFromTheInput,
       {1, 0},
       {{2, 0}, {2, 0}, {2, 0}},
       FreezeAllButABias,
       kFreed,
       "layer0.out.bias"},
  };
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointUnitsTest,
                         ::testing::ValuesIn(Scenarios()),
                         [](const auto& info) { return info.param.name; });

// The first event of such a model's backward is a recomputation.
TEST(CheckpointedStepTest, ARegionAroundTheWholeModel) {
  RecordedRanks ranks(2);
  const Scenario scenario = {"", WholeLayer, EachLayer};
  const auto run = [&](Communicator& world) -> absl::Status {
    CollectiveLog& log = ranks.logs[world.rank()];
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, world));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(scenario, world));
    for (int step = 0; step < 2; ++step) {
      FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), step)));
      log.Clear();
      const at::Tensor output =
          Checkpoint([&](const at::Tensor& x) { return model->forward(x); },
                     Rows(step, 2, Layer::kDim));
      FSDP_RETURN_IF_ERROR(model->Backward(output.square().mean()));
      FSDP_RETURN_IF_ERROR(CheckCounts(log, scenario));
      FSDP_RETURN_IF_ERROR(CheckGradients(*model, *reference));
    }
    return absl::OkStatus();
  };
  EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
}

// Control flow depends on the data: a rank without a gradient reduces after the
// nested backward.
TEST(CheckpointedStepTest, AUnitInARegionWhoseParametersOnlyOneRankUses) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Scenario scenario = {"", WholeLayer, EachLayerInARegion};
    const auto skip = [rank = world.rank()](Layer& layer, const at::Tensor& x) {
      return rank == 0 ? WholeLayer(layer, x) : x * 2;
    };
    Scenario skipping = scenario;
    skipping.layer = skip;
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(skipping, world));
    FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), 0)));
    for (const TensorRange& named : model->Ranges()) {
      EXPECT_TRUE(named.values.grad().defined()) << named.name;
    }
    return CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                     "bytes of parameters after backward");
  }));
}

// --- Arguments that are offloaded --------------------------------------------

using ::fsdp::offload::ParamStore;
using ::fsdp::offload::testing::Fault;

constexpr int64_t kRows = 3;

// The unit's own memory is an argument.
at::Tensor WithItsWeightAsArgument(Layer& layer, const at::Tensor& x) {
  const at::Tensor y = Region(
      [](const at::Tensor& x, const at::Tensor& weight,
         const at::Tensor& part) {
        return at::linear(x, weight).narrow(1, 0, Layer::kDim) + part;
      },
      x, layer.fc->weight, layer.fc->bias.narrow(0, 1, Layer::kDim));
  return WholeLayer(layer, y);
}

// All regions share one argument.
at::Tensor RegionsWithASharedArgument(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  const at::Tensor shared = at::tanh(y);
  for (const auto& layer : net.layers) {
    y = Region(
        [&](const at::Tensor& y, const at::Tensor& shared) {
          return Forward(layer, y) * shared;
        },
        y, shared);
  }
  return y;
}

struct OffloadScenario {
  Scenario scenario;
  int tensors;  // moved out in a step
};

std::vector<OffloadScenario> OffloadScenarios() {
  return {
      {{"Around", WholeLayer, EachLayerInARegion}, 3},
      {{"Inside", LayerInThreeRegions, EachLayer}, 9},
      {{"Nested", WholeLayer, NestedRegionsBehindTheFirst}, 3},
      {{"AroundAndInside", LayerInThreeRegions, EachLayerInARegion}, 3 + 9},
      {{"NestedAndInside", LayerInThreeRegions, NestedRegionsBehindTheFirst},
       3 + 9},
      {{"WeightAsArgument", WithItsWeightAsArgument, EachLayer}, 3},
      {{"SharedArgument", WholeLayer, RegionsWithASharedArgument}, 4},
  };
}

std::unique_ptr<ParamStore> Host() {
  return offload::HostStore::Make(64 * offload::kPageBytes).value();
}

at::Tensor Loss(FullyShardedDataParallel<Net>& model, int batch, int rank) {
  return model->forward(Rows(10 * batch + rank, kRows, Layer::kDim))
      .square()
      .mean();
}

absl::Status CheckEmpty(ActivationOffload& offload) {
  return Check(StoreComesTo(offload, 0), "a region is left");
}

absl::StatusOr<at::Tensor> Step(FullyShardedDataParallel<Net>& model, int step,
                                int rank) {
  model->zero_grad();
  at::Tensor loss = Loss(model, step, rank);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  return loss;
}

absl::Status CheckScenario(Communicator& world, const OffloadScenario& c) {
  FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(c.scenario, world));
  FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(c.scenario, world));
  FSDP_ASSIGN_OR_RETURN(const auto expected, Step(reference, 0, world.rank()));
  const auto offload = Make(Host());
  offload_of_rank = offload;
  arguments_of_rank.clear();
  const at::Tensor loss = Loss(model, 0, world.rank());
  int alive = 0;
  for (const auto& memory : arguments_of_rank) alive += !memory.expired();
  // A unit's residual connection saves nothing, and the product with the shared
  // argument is computed in the region.
  EXPECT_EQ(alive, 0) << "arguments are in memory";
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  offload_of_rank = nullptr;
  FSDP_RETURN_IF_ERROR(CheckEmpty(*offload));
  EXPECT_EQ(offload->stats().failed + offload->stats().full, 0);
  EXPECT_EQ(offload->stats().tensors_out, c.tensors);
  FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
  return CheckSameGradients(*model, *reference);
}

TEST(OffloadedUnitsTest, TrainWithTheBitsOfThoseInMemory) {
  for (const OffloadScenario& c : OffloadScenarios()) {
    EXPECT_OK(RunAllRanks(2, [&c](Communicator& world) {
      return CheckScenario(world, c);
    })) << c.scenario.name;
  }
}

// The read fails alike on all ranks, so that their collectives stay in step.
TEST(OffloadedFaultTest, AReadThatFailsNamesTheUnitAndTheNextStepIsExact) {
  const Scenario scenario = {"", LayerInThreeRegions, EachLayer};
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, world));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(scenario, world));
    Fault fault;
    fault.operation = Fault::Operation::kRead;
    fault.nth = 4;  // read ahead for the second unit's second region
    fault.count = 2;
    offload_of_rank = Make(offload::testing::WithFaults(Host(), {fault}));
    FSDP_RETURN_IF_ERROR(
        CheckRefused(model->Backward(Loss(model, 0, world.rank())),
                     "move tensor 0 in the arguments of a checkpointed region "
                     "in unit layer1, Float [3, 10] on cpu",
                     Code::kUnavailable));
    FSDP_RETURN_IF_ERROR(CheckEmpty(*offload_of_rank));
    FSDP_ASSIGN_OR_RETURN(const auto loss, Step(model, 1, world.rank()));
    offload_of_rank = nullptr;
    FSDP_ASSIGN_OR_RETURN(const auto expected,
                          Step(reference, 1, world.rank()));
    FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
    return CheckSameGradients(*model, *reference);
  }));
}

// --- Buffers -----------------------------------------------------------------

constexpr int64_t kDim = 5;

// A block with LibTorch's running statistics, and a buffer that every use
// changes.
class BlockImpl : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    {
      const c10::NoGradGuard no_grad;
      uses.mul_(0.5).add_(x.mean(0));
    }
    return norm->forward(fc->forward(x)).tanh();
  }
  Linear fc = register_module("fc", Linear(kDim, kDim));
  torch::nn::BatchNorm1d norm =
      register_module("norm", torch::nn::BatchNorm1d(kDim));
  at::Tensor uses = register_buffer("uses", at::zeros({kDim}));
};

at::Tensor StepWith(const CheckpointOptions& options,
                    const std::shared_ptr<BlockImpl>& block) {
  const at::Tensor x = Rows(0, 4, kDim);
  const at::Tensor y = CheckpointWith(
      options, [block](const at::Tensor& x) { return block->forward(x); }, x);
  y.square().sum().backward();
  return block->fc->weight.grad();
}

std::shared_ptr<BlockImpl> MakeBlock() {
  auto block = std::make_shared<BlockImpl>();
  testing::FillParameters(*block, 1);
  return block;
}

TEST(CheckpointBuffersTest, OfModulesThatAreNamed) {
  auto plain = MakeBlock();
  plain->forward(Rows(0, 4, kDim)).square().sum().backward();
  auto block = MakeBlock();
  CheckpointOptions options;
  options.modules = {block};
  EXPECT_TRUE(at::allclose(StepWith(options, block), plain->fc->weight.grad()));
  EXPECT_OK(SameBuffers(*block, *plain));
  EXPECT_EQ(block->norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(CheckpointBuffersTest, StayAsTheyAreWhereThatIsWanted) {
  auto block = MakeBlock();
  CheckpointOptions options;
  options.modules = {block};
  options.restore_buffers = false;
  StepWith(options, block);
  EXPECT_EQ(block->norm->num_batches_tracked.item<int64_t>(), 2);
}

// A graph that has saved a buffer before may still run backward.
TEST(CheckpointBuffersTest, ArePutBackWithoutCountingAsModified) {
  auto block = MakeBlock();
  block->eval();
  CheckpointOptions options;
  options.modules = {block};
  at::Tensor x = Rows(0, 4, kDim).requires_grad_();
  const at::Tensor before = x * block->norm->running_var;
  CheckpointWith(
      options, [block](const at::Tensor& x) { return block->norm->forward(x); },
      before)
      .square()
      .sum()
      .backward();
  EXPECT_TRUE(x.grad().defined());
}

}  // namespace
}  // namespace fsdp::testing
