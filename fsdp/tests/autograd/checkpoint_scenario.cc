#include "fsdp/tests/autograd/checkpoint_scenario.h"

#include <ATen/ops/tanh.h>

#include "fsdp/testing/layered_net.h"

namespace fsdp::testing {

at::Tensor LayerInOneRegion(Layer& layer, const at::Tensor& x) {
  return Region([&](const at::Tensor& x) { return WholeLayer(layer, x); }, x);
}

at::Tensor LayerInThreeRegions(Layer& layer, const at::Tensor& x) {
  at::Tensor y =
      Region([&](const at::Tensor& x) { return layer.fc->forward(x); }, x);
  y = Region([](const at::Tensor& y) { return at::tanh(y); }, y);
  return x +
         Region([&](const at::Tensor& y) { return layer.out->forward(y); }, y);
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

namespace {

// Regions outlive the call, so they hold copies of `first`.
template <typename First>
at::Tensor Nested(First first, Net& net, const at::Tensor& x) {
  return Region(
      [first, &net](const at::Tensor& x) {
        const at::Tensor y = Forward(net.layers[0], first(x));
        return Region(
            [&net](const at::Tensor& y) {
              const at::Tensor z = Forward(net.layers[1], y);
              return Region(
                  [&net](const at::Tensor& z) {
                    return Forward(net.layers[2], z);
                  },
                  z);
            },
            y);
      },
      x);
}

}  // namespace

at::Tensor LayersInNestedRegions(Net& net, const at::Tensor& x) {
  return Nested([&net](const at::Tensor& x) { return net.embed->forward(x); },
                net, x);
}

at::Tensor NestedRegionsBehindTheFirst(Net& net, const at::Tensor& x) {
  return Nested([](const at::Tensor& x) { return x; }, net,
                net.embed->forward(x));
}

std::shared_ptr<Net> MakeNet(const Scenario& scenario) {
  auto net = std::make_shared<Net>(scenario.layer, scenario.body);
  FillParameters(*net, 1);
  scenario.prepare(*net);
  return net;
}

absl::StatusOr<FullyShardedDataParallel<Net>> ShardNet(
    const Scenario& scenario, Communicator& communicator) {
  Options options = UnitsOf<Layer>();
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
  for (size_t i = 0; i < model.Ranges().size(); ++i) {
    const TensorRange& named = model.Ranges()[i];
    const at::Tensor actual = named.values.grad();
    const at::Tensor same = without_regions.Ranges()[i].values.grad();
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
    if (!at::allclose(actual, OwnPart(named, truth), 1e-4, 1e-6)) {
      return absl::InternalError(absl::StrCat(named.name, " is wrong"));
    }
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing
