// Nets with checkpointed regions around and inside units, and the checks of
// their steps.
#ifndef FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_
#define FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_

#include <ATen/ops/tanh.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "fsdp/autograd/autograd.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/sharded_test.h"  // IWYU pragma: export

namespace fsdp::testing {

class Layer;
using LayerBody = std::function<at::Tensor(Layer&, const at::Tensor&)>;

// Computes body(x); a unit for the test to wrap.
class Layer : public torch::nn::Module {
 public:
  static constexpr int64_t kDim = 5;

  explicit Layer(LayerBody body)
      : fc(register_module("fc", Linear(kDim, 2 * kDim))),
        out(register_module("out", Linear(2 * kDim, kDim))),
        body_(std::move(body)) {}
  at::Tensor forward(const at::Tensor& x) { return body_(*this, x); }

  Linear fc, out;

 private:
  const LayerBody body_;
};

inline at::Tensor WholeLayer(Layer& layer, const at::Tensor& x) {
  return x + layer.out->forward(at::tanh(layer.fc->forward(x)));
}

class Net;
using NetBody = std::function<at::Tensor(Net&, const at::Tensor&)>;

// Computes head(body(x)); the body calls the layers, and may call `embed`.
class Net : public torch::nn::Module {
 public:
  static constexpr int kLayers = 3;

  Net(const LayerBody& layer_body, NetBody body)
      : embed(register_module("embed", Linear(Layer::kDim, Layer::kDim))),
        head(register_module("head", Linear(Layer::kDim, Layer::kDim))),
        body_(std::move(body)) {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(absl::StrCat("layer", i),
                                       std::make_shared<Layer>(layer_body)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(body_(*this, x));
  }

  Linear embed, head;
  std::vector<std::shared_ptr<Layer>> layers;

 private:
  const NetBody body_;
};

// Each rank has its own switch, so that one model runs with its regions and
// without.
inline thread_local bool regions_are_on = true;
// This rank's offload of regions, or null, and the memory of their first
// arguments outside of backward.
inline thread_local std::shared_ptr<ActivationOffload> offload_of_rank;
inline thread_local std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>
    arguments_of_rank;

template <typename Fn, typename... More>
at::Tensor Region(Fn fn, const at::Tensor& x, const More&... more) {
  if (!regions_are_on) return fn(x, more...);
  if (!InsideBackward()) {
    arguments_of_rank.push_back(x.storage().getWeakStorageImpl());
  }
  CheckpointOptions options;
  options.offload = offload_of_rank;
  return CheckpointWith(options, std::move(fn), x, more...);
}

inline at::Tensor LayerInOneRegion(Layer& layer, const at::Tensor& x) {
  return Region([&](const at::Tensor& x) { return WholeLayer(layer, x); }, x);
}

inline at::Tensor LayerInThreeRegions(Layer& layer, const at::Tensor& x) {
  at::Tensor y =
      Region([&](const at::Tensor& x) { return layer.fc->forward(x); }, x);
  y = Region([](const at::Tensor& y) { return at::tanh(y); }, y);
  return x +
         Region([&](const at::Tensor& y) { return layer.out->forward(y); }, y);
}

inline at::Tensor EachLayer(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  for (const auto& layer : net.layers) y = Forward(layer, y);
  return y;
}

inline at::Tensor EachLayerInARegion(Net& net, const at::Tensor& x) {
  at::Tensor y = net.embed->forward(x);
  for (const auto& layer : net.layers) {
    y = Region([&](const at::Tensor& y) { return Forward(layer, y); }, y);
  }
  return y;
}

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

// Runs each of three layers in a region inside that of the layer before, with
// what precedes the first in its region or before it.
inline at::Tensor LayersInNestedRegions(Net& net, const at::Tensor& x) {
  return Nested([&net](const at::Tensor& x) { return net.embed->forward(x); },
                net, x);
}

inline at::Tensor NestedRegionsBehindTheFirst(Net& net, const at::Tensor& x) {
  return Nested([](const at::Tensor& x) { return x; }, net,
                net.embed->forward(x));
}

// The all-gathers and reduce-scatters of one step.
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
  std::string ignored = {};
};

inline absl::StatusOr<FullyShardedDataParallel<Net>> ShardNet(
    const Scenario& scenario, Communicator& world) {
  Options options = GoOn(UnitsOf<Layer>());
  options.unit.strategy = scenario.strategy;
  if (!scenario.ignored.empty()) {
    options.ignore.parameter = [ignored = scenario.ignored](
                                   const std::string& name, const at::Tensor&) {
      return name == ignored;
    };
  }
  auto net = std::make_shared<Net>(scenario.layer, scenario.body);
  FillParameters(*net, 1);
  scenario.prepare(*net);
  return FullyShard(net, Unowned(world), options);
}

// Checks the counts of every unit in one step.
inline absl::Status CheckCounts(const CollectiveLog& log,
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

// Checks that gradients are there, and have the bits, as without regions.
// KnownProgramTest compares them with plain LibTorch's.
inline absl::Status CheckGradients(const ShardedModuleBase& model,
                                   const ShardedModuleBase& without_regions) {
  for (size_t i = 0; i < model.Ranges().size(); ++i) {
    const TensorRange& named = model.Ranges()[i];
    const at::Tensor actual = named.values.grad();
    const at::Tensor same = without_regions.Ranges()[i].values.grad();
    if (!actual.defined() && !same.defined()) continue;
    FSDP_RETURN_IF_ERROR(
        CheckTensor(actual, same, absl::StrCat("gradient of ", named.name)));
  }
  return absl::OkStatus();
}

template <typename Model>
at::Tensor LossOf(Model& model, int step) {
  return model.forward(Rows(step, 2, Layer::kDim)).square().mean();
}

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_
