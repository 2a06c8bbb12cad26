// The groups of ranks of units with different strategies, and what the schedule
// is told of units.
#ifndef FSDP_SETUP_PLACEMENTS_H_
#define FSDP_SETUP_PLACEMENTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

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

#endif  // FSDP_SETUP_PLACEMENTS_H_
