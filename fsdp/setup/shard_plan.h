// Decides and checks what sharding a module will do, before anything is
// changed. A planned unit becomes flat parameters (Sharder makes them with
// values, others to predict them without) and a unit of the schedule.
#ifndef FSDP_SETUP_SHARD_PLAN_H_
#define FSDP_SETUP_SHARD_PLAN_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/precision_switch.h"
#include "fsdp/schedule/schedule.h"
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
  std::vector<PlannedUnit> units;   // units that own something, and the root
  std::vector<CastBuffer> buffers;  // floating-point and others
};

// Plans for this rank. ShardModule() says what is refused.
absl::StatusOr<ShardPlan> PlanSharding(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options);

// Returns everything that ranks have to agree on, one line each, to compare as
// text.
std::string Fingerprint(const ShardPlan& plan, const Options& options);

// Properties that the parameters of one flat parameter share. Trained
// parameters are spread over all shards if nothing frozen lies between them.
struct FlatKind {
  c10::ScalarType stored;
  c10::ScalarType computed;
  bool frozen;

  friend bool operator<(const FlatKind& a, const FlatKind& b) {
    return std::tie(a.stored, a.computed, a.frozen) <
           std::tie(b.stored, b.computed, b.frozen);
  }
};

using FlatParameters = std::vector<flat_param::NamedParameter>;

// Returns the unit's flat parameters in the order in which they are sharded.
std::map<FlatKind, FlatParameters> FlatsOf(const ModuleTree& tree,
                                           const PlannedUnit& planned);

// Returns the layout over `ranks`. InvalidArgument as from
// FlatLayout::Create().
absl::StatusOr<flat_param::FlatLayout> LayoutOf(
    const FlatParameters& parameters, const FlatKind& kind, int ranks);

struct GradientDtypes {
  c10::ScalarType reduced;
  c10::ScalarType of_shard;
};
GradientDtypes GradientDtypesOf(const PlannedUnit& planned,
                                const FlatKind& kind);

// Returns whether any tensor of `parameters` requires grad.
bool AnyTrainable(const FlatParameters& parameters);

// Returns what options alone decide of a scheduled unit. The caller sets what
// depends on the unit's ranks (`replicated`, `sharded`, `keeps_part`) and on
// where its memory is (`shares_memory`, `rests_elsewhere`).
ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options);

ScheduleOptions ScheduleOptionsOf(const Options& options);

}  // namespace fsdp

#endif  // FSDP_SETUP_SHARD_PLAN_H_
