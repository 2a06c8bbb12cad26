// A planned unit becomes flat parameters (Sharder makes them with values,
// others to predict them without), groups of ranks, and a unit of the schedule.
#ifndef FSDP_SETUP_PLANNED_UNIT_H_
#define FSDP_SETUP_PLANNED_UNIT_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/options/options.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

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

// Memory for whole parameters that the ranks of a host share: one allocation
// for each group of ranks, cut into pieces. Ranks of a group make the same
// calls in the same order.
class CommonFlats {
 public:
  // Asks for a piece of `bytes` for `group` and returns its number.
  int Add(std::shared_ptr<comm::Communicator> group, int64_t bytes);

  // Allocates; call it once. Collective. A group whose ranks cannot share
  // memory gets none, and a group of one rank needs none.
  absl::Status Allocate();

  // Returns piece `number`, uint8; undefined if there is none.
  at::Tensor Piece(int number) const;

  // Returns a fence for each group that got memory.
  std::vector<std::unique_ptr<comm::Fence>> TakeFences();

 private:
  struct Group {
    std::shared_ptr<comm::Communicator> communicator;
    int64_t bytes = 0;
    comm::CommonMemory common;
  };
  struct Range {
    size_t group;
    int64_t begin;
    int64_t bytes;
  };

  std::vector<Group> groups_;
  std::vector<Range> ranges_;
};

// Splits and quantises each group once, however many units use it.
class Placements {
 public:
  // `quantization` must outlive this object.
  Placements(const comm::Mesh& mesh, const Quantization& quantization)
      : mesh_(mesh), quantization_(quantization) {}

  // Returns the groups of a unit. Collective, in the same order on all ranks.
  // `options` must have been checked.
  absl::StatusOr<Placement> Of(const UnitOptions& options);

  // Returns whether gathers of `placement` are quantised.
  bool QuantizesGathers(const Placement& placement) const;
  // Adds the quantised group to `placement`. `exact_tail` counts the last
  // elements of each rank's part of a sum, which stay exact.
  absl::Status Quantize(int64_t exact_tail, Placement& placement);

 private:
  using Group = std::shared_ptr<comm::Communicator>;

  absl::StatusOr<Group> Split(const Group& group, int size);

  const comm::Mesh mesh_;
  const Quantization& quantization_;
  std::map<std::pair<const void*, int>, Group> split_;
  std::map<std::pair<const void*, int64_t>, Group> quantized_;
};

// Returns what options alone decide of a scheduled unit. The caller sets what
// depends on the unit's ranks (`replicated`, `sharded`, `keeps_part`) and on
// where its memory is (`shares_memory`, `rests_elsewhere`).
ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options);

ScheduleOptions ScheduleOptionsOf(const Options& options);

}  // namespace fsdp

#endif  // FSDP_SETUP_PLANNED_UNIT_H_
