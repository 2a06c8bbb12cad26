// The groups of ranks that units with different strategies lie on.
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
#include "fsdp/options/quantization.h"
#include "fsdp/runtime/runtime_unit.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

// Splits and quantises each group once, however many units lie on it.
class Placements {
 public:
  // `quantization` outlives this object.
  Placements(const comm::Mesh& mesh, const Quantization& quantization)
      : mesh_(mesh), quantization_(quantization) {}

  // Collective, in the same order on all ranks. `options` have been checked.
  absl::StatusOr<Placement> Of(const UnitOptions& options);

  // Whether gathers of `placement` are quantised.
  bool QuantizesGathers(const Placement& placement) const;
  // Adds what is quantised. `exact_tail`: of each rank's part of a sum.
  absl::Status Quantize(int64_t exact_tail, Placement& placement);

 private:
  using Group = std::shared_ptr<comm::Communicator>;

  absl::StatusOr<Group> Split(const Group& group, int size);

  const comm::Mesh mesh_;
  const Quantization& quantization_;
  std::map<std::pair<const void*, int>, Group> split_;
  std::map<std::pair<const void*, int64_t>, Group> quantized_;
};

// What the schedule is told of units, as far as options alone decide it.

// What depends on the ranks that the unit lies on (`replicated`, `sharded`,
// `keeps_part`) and on where its memory is (`shares_memory`, `rests_elsewhere`)
// is left to the caller.
ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options);

ScheduleOptions ScheduleOptionsOf(const Options& options);

}  // namespace fsdp

#endif  // FSDP_SETUP_PLACEMENTS_H_
