#include <torch/nn/modules/linear.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "comm/mesh.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/program/plain_program.h"
#include "fsdp/testing/program/program.h"
#include "fsdp/testing/program/program_model.h"
#include "fsdp/testing/program/sharded_run.h"

namespace fsdp::testing {
namespace {

MixedPrecision PrecisionOf(const Program& p) {
  MixedPrecision precision;
  if (ComputeDtype(p) == StoredDtype(p)) return precision;
  precision.param_dtype = ComputeDtype(p);
  if (p.exact_reduce) precision.reduce_dtype = at::kDouble;
  precision.keep_low_precision_grads = p.low_precision_gradients != 0;
  if (p.salt % 3 != 0 && CallsByForward(p) && !p.wrap_linear) {
    precision.cast_inputs = CastInputs::kEveryUnit;
  }
  return precision;
}

// Returns the strategy of the root, of a unit, or of a module inside a unit.
ShardingStrategy StrategyAt(const Program& p, const std::string& path) {
  for (int i = 0; i < p.num_units; ++i) {
    if (!absl::StartsWith(path, absl::StrCat("unit", i))) continue;
    return static_cast<ShardingStrategy>(StrategyOf(p, p.units[i]));
  }
  return static_cast<ShardingStrategy>(p.strategy);
}

// Returns a size that divides a row of the mesh.
std::optional<int> BackwardGroupOf(const Program& p) {
  if (p.backward_group == 0) return std::nullopt;
  const int row = p.ranks / CountOf(p.rows, p.ranks);
  std::vector<int> sizes;
  for (int size = 1; size <= row; ++size) {
    if (row % size == 0) sizes.push_back(size);
  }
  return sizes[(p.backward_group - 1) % sizes.size()];
}

bool FreesAfterForward(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kFullShard ||
         strategy == ShardingStrategy::kHybridShard;
}

OffloadOptions OffloadOf(const Program& p, const std::string& directory) {
  const auto tier = [](int rests) {
    return rests ? Tier::kSsd : Tier::kDevice;
  };
  OffloadOptions offload;
  offload.parameters = tier(p.rest_parameters);
  offload.gradients = tier(p.rest_gradients);
  offload.optimizer = tier(p.rest_states);
  if (p.budget) offload.memory_budget = p.budget;
  offload.directory = directory;
  offload.block_bytes = p.big_blocks ? 8192 : 4096;
  offload.keep = p.keep != 0;
  offload.rollback = p.rollback || p.keep;
  offload.prefetch_distance = p.distance;
  offload.optimizer_state = p.optimizer == kSgd ? 1 : p.amsgrad ? 3 : 2;
  return offload;
}

WrapPolicy RecomputedUnits(const Program& p) {
  std::set<std::string> paths;
  for (int i = 0; i < p.num_units; ++i) {
    if (p.units[i].recompute) paths.insert(absl::StrCat("unit", i));
  }
  if (paths.empty()) return nullptr;
  return [paths](const WrapCandidate& candidate) {
    return paths.count(candidate.path) > 0;
  };
}

}  // namespace

Options OptionsOf(const Program& p, const std::string& directory) {
  Options options;
  if (p.wrap_linear) {
    options.wrap_policy =
        WrapModules<ProgramUnitModule, torch::nn::LinearImpl>();
  } else if (!p.no_wrap) {
    options.wrap_policy = WrapModules<ProgramUnitModule>();
  }
  options.transparent = p.transparent != 0;
  options.recompute.units = RecomputedUnits(p);
  options.unit.precision = PrecisionOf(p);
  options.configure_unit = [p](const std::string& path,
                               const torch::nn::Module&, UnitOptions& unit) {
    unit.strategy = StrategyAt(p, path);
    if (FreesAfterForward(unit.strategy)) {
      unit.backward_group_size = BackwardGroupOf(p);
    }
  };
  options.abort_on_failure = false;
  if (p.divide) options.gradients.divide_factor = DivisorOf(p);
  if (p.predivide) options.gradients.predivide_factor = p.predivide;
  options.quantize.gather = p.quantize_gather != 0;
  options.quantize.reduce = p.quantize_reduce != 0;
  options.quantize.block = p.salt % 2 ? 64 : 256;
  options.share_memory = p.share_memory != 0;
  options.reshard_root_after_forward = p.reshard_root != 0;
  options.prefetch.forward = p.forward_prefetch != 0;
  options.prefetch.backward = p.backward_prefetch != 0;
  options.checks.order = p.check_order != 0;
  options.offload = OffloadOf(p, directory);
  return options;
}

std::vector<comm::MeshDimension> MeshOf(const Program& p) {
  const int rows = CountOf(p.rows, p.ranks);
  std::vector<comm::MeshDimension> dimensions;
  if (rows > 1 || p.salt % 7 == 0) dimensions.push_back({"replicate", rows});
  dimensions.push_back({"shard", p.ranks / rows});
  return dimensions;
}

// In double precision, only the order of sums differs. If units compute in
// another dtype and gradients are reduced in double, both models round at the
// same places, and a difference in the last bit of a double is hardly ever
// rounded to another number. Otherwise, a few roundings of the coarser dtype
// differ.
double ToleranceOf(const Program& p) {
  constexpr double kTolerances[] = {1e-8, 2e-3, 1e-4, 5e-2, 1e-2};
  if (p.quantize_gather || p.quantize_reduce) return 0.1;
  const bool same_rounding = p.precision >= kComputeFloat && p.exact_reduce &&
                             !p.low_precision_gradients && !ReusesParameters(p);
  // A region that is recomputed first adds up the gradients of its own uses.
  if (same_rounding) return RecomputesRegions(p) ? 1e-5 : 1e-6;
  // The summed gradients were rounded to half precision before.
  if (p.precision == kComputeHalf && ReusesParameters(p)) return 5e-2;
  if (p.precision == kComputeBFloat16 && ReusesParameters(p)) return 0.2;
  return kTolerances[p.precision];
}

}  // namespace fsdp::testing
