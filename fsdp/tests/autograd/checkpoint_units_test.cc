// Checkpointed regions around and inside units: gradients are those of the same
// model without regions, and no collective is added.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>

#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/run_ranks.h"
#include "comm/wrappers/recording_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/layered_net.h"
#include "fsdp/testing/toy_model.h"
#include "fsdp/tests/autograd/layer_regions.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::AllOk;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::Layer;
using ::fsdp::testing::LayerBody;
using ::fsdp::testing::LayerInThree;
using ::fsdp::testing::LayersNested;
using ::fsdp::testing::Net;
using ::fsdp::testing::NetBody;
using ::fsdp::testing::Rows;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::fsdp::testing::WholeLayer;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

// Of this rank, so that the same model runs with its regions and without.
thread_local bool regions_are_on = true;

template <typename Fn>
at::Tensor Region(Fn fn, const at::Tensor& x) {
  return regions_are_on ? Checkpoint(std::move(fn), x) : fn(x);
}

at::Tensor LayerInOneRegion(Layer& layer, const at::Tensor& x) {
  return Region([&](const at::Tensor& x) { return WholeLayer(layer, x); }, x);
}

const auto kRegion = [](auto fn, const at::Tensor& x) {
  return Region(std::move(fn), x);
};

at::Tensor LayerInThreeRegions(Layer& layer, const at::Tensor& x) {
  return LayerInThree(kRegion, layer, x);
}

// A part of the unit's parameters outside, another inside.
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

at::Tensor EachLayer(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  for (const auto& layer : net.layers) y = Forward(layer, y);
  return y;
}

at::Tensor EachLayerInARegion(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  for (const auto& layer : net.layers) {
    y = Region([&](const at::Tensor& y) { return Forward(layer, y); }, y);
  }
  return y;
}

// Without the gradient of an input: the first region has none but its
// parameters'.
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

at::Tensor LayersInNestedRegions(Net& net, const at::Tensor& x) {
  const auto embed = [&net](const at::Tensor& x) {
    return net.embed->forward(x);
  };
  return LayersNested(kRegion, embed, net, x);
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

// All-gathers and reduce-scatters of one step.
struct Counts {
  int64_t gathers;
  int64_t reductions;

  bool operator==(const Counts& other) const {
    return gathers == other.gathers && reductions == other.reductions;
  }
};

constexpr Counts kRootCounts = {1, 1};
constexpr Counts kUnitCounts = {2, 1};
constexpr Counts kNone = {0, 0};

struct Scenario {
  std::string name;
  LayerBody layer;
  NetBody body;
  Counts root = kRootCounts;
  std::vector<Counts> layers = {kUnitCounts, kUnitCounts, kUnitCounts};
  std::function<void(Net&)> prepare = [](Net&) {};
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  bool transparent = false;
  std::string ignored = "";
  bool counts_matter = true;
  // The gradients have the same bits as without regions: they are added in the
  // same order.
  bool exact = true;
  std::vector<int> world_sizes = {1, 2, 3};
};

std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name;
}

std::shared_ptr<Net> MakeNet(const Scenario& scenario) {
  auto net = std::make_shared<Net>(scenario.layer, scenario.body);
  FillParameters(*net, 1);
  scenario.prepare(*net);
  return net;
}

absl::StatusOr<FullyShardedDataParallel<Net>> ShardNet(
    const Scenario& scenario, Communicator& communicator) {
  Options options;
  options.wrap_policy = WrapModules<Layer>();
  options.unit.strategy = scenario.strategy;
  options.transparent = scenario.transparent;
  if (!scenario.ignored.empty()) {
    options.ignore.parameter = [ignored = scenario.ignored](
                                   const std::string& name, const at::Tensor&) {
      return name == ignored;
    };
  }
  options.abort_on_failure = false;
  return FullyShard(MakeNet(scenario), Unowned(communicator), options);
}

template <typename Model>
at::Tensor LossOf(Model& model, int step) {
  at::manual_seed(step);
  return model.forward(Rows(step, 2, Layer::kDim)).square().mean();
}

absl::Status CheckCounts(const comm::CollectiveLog& log,
                         const Scenario& scenario) {
  for (int i = -1; i < Net::kLayers; ++i) {
    const std::string unit = i == -1 ? "root" : absl::StrCat("layer", i);
    const Counts expected = i == -1 ? scenario.root : scenario.layers[i];
    const Counts actual = {
        log.TotalsOf(Collective::kAllGather, unit).count,
        log.TotalsOf(Collective::kReduceScatter, unit).count};
    if (actual == expected) continue;
    return absl::InternalError(absl::StrCat(unit, ": ", actual.gathers,
                                            " all-gathers, ", actual.reductions,
                                            " reduce-scatters"));
  }
  return absl::OkStatus();
}

absl::Status CheckGradients(const ShardedModuleBase& model,
                            const ShardedModuleBase& without_regions,
                            Net& plain, bool exact) {
  const auto parameters = plain.named_parameters();
  for (size_t i = 0; i < model.NamedShards().size(); ++i) {
    const NamedShard& named = model.NamedShards()[i];
    const at::Tensor actual = named.shard.grad();
    const at::Tensor same = without_regions.NamedShards()[i].shard.grad();
    const at::Tensor truth = parameters[named.name].grad();
    if (actual.defined() != truth.defined() ||
        same.defined() != truth.defined()) {
      return absl::InternalError(absl::StrCat(
          named.name, truth.defined() ? " has no" : " has a", " gradient"));
    }
    if (!actual.defined()) continue;
    if (exact && !at::equal(actual, same)) {
      return absl::InternalError(absl::StrCat(named.name, " has other bits"));
    }
    if (!at::allclose(
            actual,
            truth.reshape({-1}).narrow(0, named.begin, named.shard.numel()),
            1e-4, 1e-6)) {
      return absl::InternalError(absl::StrCat(named.name, " is wrong"));
    }
  }
  return absl::OkStatus();
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
    if (scenario.counts_matter && communicator.world_size() > 1) {
      FSDP_RETURN_IF_ERROR(CheckCounts(log, scenario));
    }
    if (!at::allclose(loss, truth)) return absl::InternalError("loss");
    FSDP_RETURN_IF_ERROR(
        CheckGradients(*model, *without_regions, *plain, scenario.exact));
    if (model->memory_stats().parameters.in_use_bytes != 0) {
      return absl::InternalError("unsharded memory is left");
    }
    if (scenario.ignored.empty()) continue;
    const auto gradient_in = [&](Net& net) {
      return net.named_parameters()[scenario.ignored].grad();
    };
    if (!at::equal(gradient_in(*model.module()), gradient_in(*plain))) {
      return absl::InternalError(scenario.ignored);
    }
  }
  return absl::OkStatus();
}

class CheckpointUnitsTest : public ::testing::TestWithParam<Scenario> {};

TEST_P(CheckpointUnitsTest, SameGradientsAndNoMoreCollectives) {
  for (int world_size : GetParam().world_sizes) {
    SCOPED_TRACE(world_size);
    ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(world_size));
    std::vector<comm::CollectiveLog> logs(group.size());
    for (size_t rank = 0; rank < group.size(); ++rank) {
      group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
    }
    EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& communicator) {
      return RunScenario(GetParam(), logs[communicator.rank()], communicator);
    })));
  }
}

void Freeze(Layer& layer) {
  for (at::Tensor& parameter : layer.parameters()) {
    parameter.set_requires_grad(false);
  }
}

// The root owns a parameter that two units use, too.
void TieFirstLayers(Net& net) {
  net.layers[1]->fc->register_parameter("tied", net.layers[0]->fc->weight);
  net.layers[1]->fc->weight = net.layers[0]->fc->weight;
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
  // Computed once: nothing in it needs a gradient. The root owns nothing that
  // is used before it.
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

std::vector<Scenario> WithTiedParameters() {
  std::vector<Scenario> scenarios = {
      {"TiedAround", WholeLayer, EachLayerInARegion},
      {"TiedInside", LayerInOneRegion, EachLayer},
      {"TiedAroundAndInside", LayerInThreeRegions, EachLayerInARegion},
      {"TiedInOneRegion", WholeLayer, AllLayersInOneRegion}};
  for (Scenario& scenario : scenarios) scenario.prepare = TieFirstLayers;
  return scenarios;
}

// A parameter that is nobody's is trained, too, although all of the units'
// are frozen.
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

at::Tensor EachLayerDirectly(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  for (const auto& layer : net.layers) y = layer->forward(y);
  return y;
}

at::Tensor EachLayerDirectlyInARegion(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  for (const auto& layer : net.layers) {
    y = Region([&](const at::Tensor& y) { return layer->forward(y); }, y);
  }
  return y;
}

at::Tensor LayersDirectlyInOneRegion(Net& net, const at::Tensor& x) {
  return Region([&](const at::Tensor& x) { return EachLayerDirectly(net, x); },
                x);
}

// Nobody sees where such a unit begins and ends: regions may cost collectives.
std::vector<Scenario> WithTransparentUnits() {
  std::vector<Scenario> scenarios = {
      {"TransparentAround", WholeLayer, EachLayerDirectlyInARegion},
      {"TransparentInOneRegion", WholeLayer, LayersDirectlyInOneRegion},
      {"TransparentInside", LayerInThreeRegions, EachLayerDirectly},
      {"TransparentPartInside", LayerPartlyInARegion, EachLayerDirectly},
      {"TransparentAroundAndInside", LayerInThreeRegions,
       LayersDirectlyInOneRegion}};
  for (Scenario& scenario : scenarios) {
    scenario.transparent = true;
    scenario.exact = false;
    scenario.counts_matter = false;
  }
  return scenarios;
}

std::string ScenarioName(const ::testing::TestParamInfo<Scenario>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Around, CheckpointUnitsTest,
                         ::testing::ValuesIn(AroundUnits()), ScenarioName);
INSTANTIATE_TEST_SUITE_P(Inside, CheckpointUnitsTest,
                         ::testing::ValuesIn(InsideUnits()), ScenarioName);
INSTANTIATE_TEST_SUITE_P(Dropout, CheckpointUnitsTest,
                         ::testing::ValuesIn(WithDropout()), ScenarioName);
INSTANTIATE_TEST_SUITE_P(Frozen, CheckpointUnitsTest,
                         ::testing::ValuesIn(WithFrozenUnits()), ScenarioName);
INSTANTIATE_TEST_SUITE_P(Tied, CheckpointUnitsTest,
                         ::testing::ValuesIn(WithTiedParameters()),
                         ScenarioName);

INSTANTIATE_TEST_SUITE_P(Ignored, CheckpointUnitsTest,
                         ::testing::ValuesIn(WithIgnoredParameters()),
                         ScenarioName);
INSTANTIATE_TEST_SUITE_P(Transparent, CheckpointUnitsTest,
                         ::testing::ValuesIn(WithTransparentUnits()),
                         ScenarioName);

// The first event of its backward is a recomputation.
TEST(CheckpointedStepTest, ARegionAroundTheWholeModel) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(2));
  std::vector<comm::CollectiveLog> logs(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
  }
  const Scenario scenario = {"", WholeLayer, EachLayer};
  const auto run = [&](Communicator& communicator) -> absl::Status {
    comm::CollectiveLog& log = logs[communicator.rank()];
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(scenario, communicator));
    const auto plain = MakeNet(scenario);
    for (int step = 0; step < 2; ++step) {
      LossOf(*plain, step).backward();
      FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), step)));
      log.Clear();
      const at::Tensor output =
          Checkpoint([&](const at::Tensor& x) { return model->forward(x); },
                     Rows(step, 2, Layer::kDim));
      FSDP_RETURN_IF_ERROR(model->Backward(output.square().mean()));
      if (communicator.world_size() > 1) {
        FSDP_RETURN_IF_ERROR(CheckCounts(log, scenario));
      }
      FSDP_RETURN_IF_ERROR(
          CheckGradients(*model, *reference, *plain, /*exact=*/true));
    }
    return absl::OkStatus();
  };
  EXPECT_OK(AllOk(RunRanks(group, run)));
}

// Data-dependent control flow in a region: the reduction of the rank that has
// no gradient takes its place after the nested backward.
TEST(CheckpointedStepTest, AUnitInARegionWhoseParametersOnlyOneRankUses) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    Scenario scenario = {"", WholeLayer, EachLayerInARegion};
    const auto skip = [rank = communicator.rank()](Layer& layer,
                                                   const at::Tensor& x) {
      return rank == 0 ? WholeLayer(layer, x) : x * 2;
    };
    Scenario skipping = scenario;
    skipping.layer = skip;
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(skipping, communicator));
    FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), 0)));
    for (const NamedShard& named : model->NamedShards()) {
      if (!named.shard.grad().defined()) {
        return absl::InternalError(
            absl::StrCat(named.name, " has no gradient"));
      }
    }
    return model->memory_stats().parameters.in_use_bytes == 0
               ? absl::OkStatus()
               : absl::InternalError("unsharded memory is left");
  }));
}

class UsersError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws when it runs for the `fails_at`-th time.
struct Fuse {
  int fails_at;
  int runs = 0;

  void Run() {
    if (runs++ == fails_at) throw UsersError("blown fuse");
  }
};

// The step in which region code throws fails, and the one after it is exact.
absl::Status CheckExceptionInRegion(
    Communicator& communicator, int fails_at, const NetBody& body,
    const std::function<LayerBody(Fuse*)>& layer, bool through_us) {
  Fuse fuse{fails_at};
  const Scenario scenario = {"", layer(&fuse), body};
  Fuse never{-1};
  const Scenario undisturbed = {"", layer(&never), body};
  FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
  FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(undisturbed, communicator));
  const auto plain = MakeNet(undisturbed);
  const absl::Status status = TorchToStatus("step", [&] {
    const at::Tensor loss = LossOf(*model.get(), 0);
    if (through_us) {
      ThrowIfError(model->Backward(loss));
    } else {
      loss.backward();
    }
  });
  if (!::testing::Value(status, StatusIs(Code::kUnknown, HasSubstr("fuse")))) {
    return absl::InternalError(status.ToString());
  }
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), 1)));
  if (model->memory_stats().parameters.in_use_bytes != 0) {
    return absl::InternalError("unsharded memory is left");
  }
  FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), 1)));
  LossOf(*plain, 1).backward();
  return CheckGradients(*model, *reference, *plain, /*exact=*/true);
}

// `runs`: of layers, in forward and backward together.
void ExpectExactAfterException(int runs, const NetBody& body,
                               const std::function<LayerBody(Fuse*)>& layer) {
  for (int fails_at = 0; fails_at < runs; ++fails_at) {
    for (bool through_us : {true, false}) {
      SCOPED_TRACE(absl::StrCat(fails_at, through_us ? " Backward" : " plain"));
      EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) {
        return CheckExceptionInRegion(communicator, fails_at, body, layer,
                                      through_us);
      }));
    }
  }
}

TEST(CheckpointedStepTest, AfterAnExceptionInARegionAroundTheNextStepIsExact) {
  ExpectExactAfterException(6, EachLayerInARegion, [](Fuse* fuse) -> LayerBody {
    return [fuse](Layer& layer, const at::Tensor& x) {
      const at::Tensor y = WholeLayer(layer, x);
      fuse->Run();
      return y;
    };
  });
}

TEST(CheckpointedStepTest, AfterAnExceptionInARegionInsideTheNextStepIsExact) {
  ExpectExactAfterException(6, EachLayer, [](Fuse* fuse) -> LayerBody {
    return [fuse](Layer& layer, const at::Tensor& x) {
      return Region(
          [fuse, &layer](const at::Tensor& x) {
            const at::Tensor y = WholeLayer(layer, x);
            fuse->Run();
            return y;
          },
          x);
    };
  });
}

TEST(CheckpointedStepTest, AfterAnExceptionInNestedRegionsTheNextStepIsExact) {
  // The innermost layer runs for each region around it.
  ExpectExactAfterException(3 + 3 + 2 + 1, LayersInNestedRegions,
                            [](Fuse* fuse) -> LayerBody {
                              return [fuse](Layer& layer, const at::Tensor& x) {
                                const at::Tensor y = WholeLayer(layer, x);
                                fuse->Run();
                                return y;
                              };
                            });
}

// Regions keep fewer activations; memory of parameters is that of one unit in
// addition to the root and a prefetched one.
TEST(CheckpointedStepTest, RegionsAroundUnitsHoldTheRootAndTwoUnitsAtMost) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    const Scenario scenario = {"", WholeLayer, EachLayerInARegion};
    const Scenario without = {"", WholeLayer, EachLayer};
    FSDP_ASSIGN_OR_RETURN(auto model, ShardNet(scenario, communicator));
    FSDP_ASSIGN_OR_RETURN(auto reference, ShardNet(without, communicator));
    for (int step = 0; step < 2; ++step) {
      FSDP_RETURN_IF_ERROR(model->Backward(LossOf(*model.get(), step)));
      FSDP_RETURN_IF_ERROR(reference->Backward(LossOf(*reference.get(), step)));
    }
    return model->memory_stats().parameters.peak_in_use_bytes <=
                   reference->memory_stats().parameters.peak_in_use_bytes
               ? absl::OkStatus()
               : absl::InternalError("more unsharded memory");
  }));
}

}  // namespace
}  // namespace fsdp
