// Decides and checks what sharding a module will do, before anything is
// changed.
#ifndef FSDP_SETUP_SHARD_PLAN_H_
#define FSDP_SETUP_SHARD_PLAN_H_

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/precision_switch.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

struct PlannedUnit {
  Unit unit;
  UnitOptions options;
  // The dtype in which each of unit.parameters is computed.
  std::vector<c10::ScalarType> compute_dtypes;
  bool recomputed = false;
};

struct ShardPlan {
  ModuleTree tree;
  std::vector<PlannedUnit> units;  // units that own something, and the root
  std::vector<BufferPrecision::Buffer> buffers;  // floating-point and others
};

// Plans for this rank. ShardModule() says what is refused.
absl::StatusOr<ShardPlan> PlanSharding(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options);

// Returns everything that ranks have to agree on, one line each, to compare as
// text.
std::string Fingerprint(const ShardPlan& plan, const Options& options);

}  // namespace fsdp

#endif  // FSDP_SETUP_SHARD_PLAN_H_
