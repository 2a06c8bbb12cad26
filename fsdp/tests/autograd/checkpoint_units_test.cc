// Checkpointed regions around and inside units: gradients have the bits of the
// same model without regions, also if arguments are offloaded, and no
// collective is added.
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>

#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/sharded_test.h"
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

at::Tensor LayerWithDropout(Layer& layer, const at::Tensor& x) {
  return at::dropout(WholeLayer(layer, x), 0.5, /*train=*/true);
}

at::Tensor LayerWithDropoutInOneRegion(Layer& layer, const at::Tensor& x) {
  return Region([&](const at::Tensor& x) { return LayerWithDropout(layer, x); },
                x);
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
absl::Status RunScenario(const Scenario& scenario, comm::CollectiveLog& log,
                         Communicator& communicator) {
  FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
  FSDP_ASSIGN_OR_RETURN(auto without_regions, ShardNet(scenario, communicator));
  for (int step = 0; step < 2; ++step) {
    regions_are_on = false;
    const at::Tensor expected = LossOf(*without_regions.get(), step);
    FSDP_RETURN_IF_ERROR(without_regions->Backward(expected));
    regions_are_on = true;
    log.Clear();
    const at::Tensor loss = LossOf(*model.get(), step);
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    // A single rank has everything.
    if (communicator.world_size() > 1) {
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
  for (int world_size : GetParam().world_sizes) {
    SCOPED_TRACE(world_size);
    RecordedRanks ranks(world_size);
    EXPECT_OK(AllOk(RunRanks(ranks.group, [&](Communicator& communicator) {
      return RunScenario(GetParam(), ranks.logs[communicator.rank()],
                         communicator);
    })));
  }
}

void Freeze(Layer& layer) {
  for (at::Tensor& parameter : layer.parameters()) {
    parameter.set_requires_grad(false);
  }
}

std::vector<Scenario> AroundUnits() {
  std::vector<Scenario> scenarios;
  scenarios.push_back({"AroundOneUnitEach", WholeLayer, EachLayerInARegion});
  scenarios.push_back({"AroundOneUnitEachWithoutGradOfTheInput", WholeLayer,
                       EachLayerInARegionFromTheInput});
  scenarios.push_back(
      {"AroundSeveralUnitsAndTheRootsOwn", WholeLayer, AllLayersInOneRegion});
  scenarios.push_back({"NestedAroundUnits", WholeLayer, LayersInNestedRegions});
  Scenario twice = {"AroundAUnitUsedInTwoRegions", WholeLayer,
                    FirstLayerTwiceInTwoRegions};
  twice.layers = {{4, 2}, kNone, kNone};
  scenarios.push_back(twice);
  twice.name = "AroundAUnitUsedTwiceInOneRegion";
  twice.body = FirstLayerTwiceInOneRegion;
  scenarios.push_back(twice);
  Scenario kept = {"AroundUnitsKeptAfterForward", WholeLayer,
                   EachLayerInARegion};
  kept.strategy = ShardingStrategy::kShardGradOp;
  kept.layers = {{1, 1}, {1, 1}, {1, 1}};
  scenarios.push_back(kept);
  return scenarios;
}

std::vector<Scenario> InsideUnits() {
  std::vector<Scenario> scenarios;
  scenarios.push_back({"InsideAUnitOneRegion", LayerInOneRegion, EachLayer});
  scenarios.push_back(
      {"InsideAUnitThreeRegions", LayerInThreeRegions, EachLayer});
  scenarios.push_back(
      {"InsideAUnitAPartOfIt", LayerPartlyInARegion, EachLayer});
  scenarios.push_back(
      {"AroundAUnitWithOneInside", LayerInOneRegion, EachLayerInARegion});
  scenarios.push_back({"AroundSeveralUnitsWithThreeInside", LayerInThreeRegions,
                       AllLayersInOneRegion});
  scenarios.push_back({"NestedAroundUnitsWithAPartInside", LayerPartlyInARegion,
                       LayersInNestedRegions});
  Scenario twice = {"InsideAUnitUsedTwice", LayerInThreeRegions,
                    FirstLayerTwice};
  twice.layers = {{4, 2}, kNone, kNone};
  scenarios.push_back(twice);
  Scenario kept = {"InsideUnitsKeptAfterForward", LayerInOneRegion, EachLayer};
  kept.strategy = ShardingStrategy::kShardGradOp;
  kept.layers = {{1, 1}, {1, 1}, {1, 1}};
  scenarios.push_back(kept);
  return scenarios;
}

std::vector<Scenario> WithDropout() {
  std::vector<Scenario> scenarios = {
      {"DropoutAround", LayerWithDropout, EachLayerInARegion},
      {"DropoutInside", LayerWithDropoutInOneRegion, EachLayer},
      {"DropoutAroundAndInside", LayerWithDropoutInOneRegion,
       AllLayersInOneRegion}};
  // Ranks that are threads share the default generator.
  for (Scenario& scenario : scenarios) scenario.world_sizes = {1};
  return scenarios;
}

std::vector<Scenario> WithFrozenUnits() {
  std::vector<Scenario> scenarios;
  const auto freeze_second = [](Net& net) { Freeze(*net.layers[1]); };
  const auto freeze_first = [](Net& net) { Freeze(*net.layers[0]); };
  Scenario inputs_need_it = {"FrozenUnitThatPassesAGradientOn", WholeLayer,
                             EachLayerInARegion};
  inputs_need_it.prepare = freeze_second;
  inputs_need_it.layers = {kUnitCounts, {2, 0}, kUnitCounts};
  scenarios.push_back(inputs_need_it);
  inputs_need_it.name = "FrozenUnitWithARegionInside";
  inputs_need_it.layer = LayerInOneRegion;
  inputs_need_it.body = EachLayer;
  scenarios.push_back(inputs_need_it);
  // The unit is computed once, because nothing in it needs a gradient. The root
  // owns nothing that is used before it.
  Scenario nothing = {"FrozenUnitThatNoGradientReaches", WholeLayer,
                      EachLayerInARegionFromTheInput};
  nothing.prepare = [](Net& net) {
    Freeze(*net.layers[0]);
    for (at::Tensor& own : net.head->parameters()) own.set_requires_grad(false);
    for (at::Tensor& own : net.embed->parameters()) {
      own.set_requires_grad(false);
    }
  };
  nothing.root = {1, 0};
  nothing.layers = {{1, 0}, kUnitCounts, kUnitCounts};
  scenarios.push_back(nothing);
  Scenario together = {"FrozenUnitBeforeATrainableOneInARegion", WholeLayer,
                       [](Net& net, const at::Tensor& x) {
                         return Region(
                             [&](const at::Tensor& x) {
                               at::Tensor y = x;
                               for (const auto& layer : net.layers) {
                                 y = Forward(layer, y);
                               }
                               return y;
                             },
                             x);
                       }};
  together.prepare = freeze_first;
  together.layers = {{2, 0}, kUnitCounts, kUnitCounts};
  scenarios.push_back(together);
  return scenarios;
}

// An ignored parameter is trained, although all parameters of units are frozen.
std::vector<Scenario> WithIgnoredParameters() {
  Scenario scenario = {"IgnoredParameterOfAFrozenUnit", WholeLayer,
                       EachLayerInARegionFromTheInput};
  scenario.ignored = "layer0.out.bias";
  scenario.prepare = [](Net& net) {
    for (at::Tensor& parameter : net.parameters()) {
      parameter.set_requires_grad(false);
    }
    net.layers[0]->out->bias.set_requires_grad(true);
  };
  scenario.root = {1, 0};
  scenario.layers = {{2, 0}, {2, 0}, {2, 0}};
  return {scenario};
}

std::vector<Scenario> Scenarios() {
  std::vector<Scenario> all;
  for (const std::vector<Scenario>& some :
       {AroundUnits(), InsideUnits(), WithDropout(), WithFrozenUnits(),
        WithIgnoredParameters()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointUnitsTest,
                         ::testing::ValuesIn(Scenarios()),
                         [](const auto& info) { return info.param.name; });

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
  FSDP_ASSIGN_OR_RETURN(const at::Tensor expected,
                        Step(reference, 0, world.rank()));
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
    const absl::Status status = model->Backward(Loss(model, 0, world.rank()));
    if (!absl::IsUnavailable(status) ||
        !absl::StrContains(status.message(),
                           "move tensor 0 in the arguments of a checkpointed "
                           "region in unit layer1, Float [3, 10] on cpu")) {
      return absl::InternalError(status.ToString());
    }
    FSDP_RETURN_IF_ERROR(CheckEmpty(*offload_of_rank));
    FSDP_ASSIGN_OR_RETURN(const auto loss, Step(model, 1, world.rank()));
    offload_of_rank = nullptr;
    FSDP_ASSIGN_OR_RETURN(const auto expected,
                          Step(reference, 1, world.rank()));
    FSDP_RETURN_IF_ERROR(CheckTensor(loss, expected, "loss"));
    return CheckSameGradients(*model, *reference);
  }));
}

}  // namespace
}  // namespace fsdp::testing
