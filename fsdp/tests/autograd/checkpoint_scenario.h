// Nets with checkpointed regions around and inside units, and the checks of
// their steps.
#ifndef FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_
#define FSDP_TESTS_AUTOGRAD_CHECKPOINT_SCENARIO_H_

#include <ATen/Context.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <ostream>

#include "fsdp/autograd/autograd.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/layered_net.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {

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

at::Tensor LayerInOneRegion(Layer& layer, const at::Tensor& x);
at::Tensor LayerInThreeRegions(Layer& layer, const at::Tensor& x);

at::Tensor EachLayer(Net& net, const at::Tensor& x);
at::Tensor EachLayerInARegion(Net& net, const at::Tensor& x);
// Runs each of three layers in a region inside that of the layer before, with
// what precedes the first in its region or before it.
at::Tensor LayersInNestedRegions(Net& net, const at::Tensor& x);
at::Tensor NestedRegionsBehindTheFirst(Net& net, const at::Tensor& x);

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
