// Decides and checks what sharding a module will do, before anything is
// changed. A planned unit becomes flat parameters, which ShardUnits() makes and
// others predict, and a unit of the schedule.
#ifndef FSDP_SETUP_SHARD_PLAN_H_
#define FSDP_SETUP_SHARD_PLAN_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/model/precision_switch.h"
#include "fsdp/options/options.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/schedule/schedule.h"
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
  // Parameters that InitOptions::loaded_later chooses.
  std::set<std::string> loaded_later;
};

// Plans for this rank. ShardModule() says what is refused.
absl::StatusOr<ShardPlan> PlanSharding(
    const std::shared_ptr<torch::nn::Module>& root, const comm::Mesh& mesh,
    const Options& options);

// Returns everything that ranks have to agree on, one line each, to compare as
// text.
std::string Fingerprint(const ShardPlan& plan, const Options& options);

// A flat parameter of a unit, before it is made. Its parameters have one dtype,
// are computed in one, and are all trained or all frozen: trained ones are
// spread over all shards if nothing frozen lies between them.
struct PlannedFlat {
  c10::ScalarType stored;
  c10::ScalarType computed;
  c10::ScalarType reduced;   // gradients, on their way
  c10::ScalarType of_shard;  // the shard's gradient
  bool trainable;            // any of the tensors requires grad
  std::vector<flat_param::NamedParameter> parameters;
  flat_param::FlatLayout layout;

  int64_t shard_bytes() const;
  int64_t whole_bytes() const;  // to compute with
  // The size of a rank's part of a reduction if every parameter is trained.
  int64_t segment_numel() const;
  int64_t shard_gradient_bytes() const;
};

// Returns the unit's flat parameters over `ranks`, in the order in which they
// are sharded. InvalidArgument as from FlatLayout::Create().
absl::StatusOr<std::vector<PlannedFlat>> PlanFlats(const ModuleTree& tree,
                                                   const PlannedUnit& planned,
                                                   int ranks);

// Returns the bytes of flat parameters, given by unit, that may rest off the
// device.
std::vector<RestingFlat> RestingFlatsOf(
    const ShardPlan& plan, const std::vector<std::vector<PlannedFlat>>& flats,
    const OffloadOptions& options);

// Returns what options alone decide of a scheduled unit. The caller sets what
// depends on the unit's ranks (`replicated`, `sharded`, `keeps_part`) and on
// where its memory is (`shares_memory`, `rests_elsewhere`).
ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options);

ScheduleOptions ScheduleOptionsOf(const Options& options);

}  // namespace fsdp

#endif  // FSDP_SETUP_SHARD_PLAN_H_
