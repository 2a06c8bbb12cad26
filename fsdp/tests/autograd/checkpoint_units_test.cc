// Checkpointed regions around and inside units: gradients have the bits of the
// same model without regions, and no collective is added.
#include <ATen/ops/dropout.h>
#include <ATen/ops/tanh.h>

#include "fsdp/testing/layered_net.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/autograd/checkpoint_scenario.h"

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
  const std::shared_ptr<Net> plain = MakeNet(scenario);
  for (int step = 0; step < 2; ++step) {
    regions_are_on = false;
    const at::Tensor truth = LossOf(*plain, step);
    truth.backward();
    FSDP_RETURN_IF_ERROR(
        without_regions->Backward(LossOf(*without_regions.get(), step)));
    regions_are_on = true;
    log.Clear();
    const at::Tensor loss = LossOf(*model.get(), step);
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    // A single rank has everything.
    if (communicator.world_size() > 1) {
      FSDP_RETURN_IF_ERROR(CheckCounts(log, scenario));
    }
    FSDP_RETURN_IF_ERROR(CheckTensor(loss, truth, 1e-5, 1e-8, "loss"));
    FSDP_RETURN_IF_ERROR(CheckGradients(*model, *without_regions, *plain));
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after backward"));
    if (scenario.ignored.empty()) continue;
    const auto gradient_in = [&](Net& net) {
      return net.named_parameters()[scenario.ignored].grad();
    };
    FSDP_RETURN_IF_ERROR(
        Check(at::equal(gradient_in(*model.module()), gradient_in(*plain)),
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

}  // namespace
}  // namespace fsdp::testing
