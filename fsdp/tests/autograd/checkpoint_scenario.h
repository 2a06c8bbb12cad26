// Nets with checkpointed regions around and inside units, and the checks of
// their steps.
#ifndef FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_
#define FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_

#include <ATen/Context.h>

#include <ostream>

#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/layered_net.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {

// Each rank has its own switch, so that one model runs with its regions and
// without.
inline thread_local bool regions_are_on = true;

template <typename Fn>
at::Tensor Region(Fn fn, const at::Tensor& x) {
  return regions_are_on ? Checkpoint(std::move(fn), x) : fn(x);
}

at::Tensor LayerInOneRegion(Layer& layer, const at::Tensor& x);
at::Tensor LayerInThreeRegions(Layer& layer, const at::Tensor& x);

at::Tensor EachLayer(Net& net, const at::Tensor& x);
at::Tensor EachLayerInARegion(Net& net, const at::Tensor& x);
at::Tensor LayersInNestedRegions(Net& net, const at::Tensor& x);

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
  bool transparent = false;
  std::string ignored = {};
  bool counts_matter = true;
  // Gradients have the same bits as without regions, because they are added in
  // the same order.
  bool exact = true;
  std::vector<int> world_sizes = {1, 2, 3};
};

inline std::ostream& operator<<(std::ostream& out, const Scenario& scenario) {
  return out << scenario.name;
}

std::shared_ptr<Net> MakeNet(const Scenario& scenario);

absl::StatusOr<FullyShardedDataParallel<Net>> ShardNet(
    const Scenario& scenario, comm::Communicator& communicator);

template <typename Model>
at::Tensor LossOf(Model& model, int step) {
  at::manual_seed(step);
  return model.forward(Rows(step, 2, Layer::kDim)).square().mean();
}

// Checks the counts of every unit in one step.
absl::Status CheckCounts(const comm::CollectiveLog& log,
                         const Scenario& scenario);

// Checks gradients against `plain`; if `exact`, also the bits against
// `without_regions`.
absl::Status CheckGradients(const ShardedModuleBase& model,
                            const ShardedModuleBase& without_regions,
                            Net& plain, bool exact);

}  // namespace fsdp::testing

#endif  // FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_
