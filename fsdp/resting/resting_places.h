// Where RestingMemory of a rank can be: in a store, or in the host's memory.
#ifndef FSDP_RESTING_RESTING_PLACES_H_
#define FSDP_RESTING_RESTING_PLACES_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/rank_activity.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/resting/deferred_releases.h"
#include "offload/host_store.h"
#include "offload/offloader.h"

namespace fsdp {

// Whom to tell of waits for a place, and what they are waits for.
struct RestingNotes {
  std::shared_ptr<comm::RankActivity> activity;  // may be null
  std::string what;                              // "unit blocks.3 (parameters)"
};

// What names a flat parameter in a store: its unit, cut where that is long, and
// its number.
std::string RegionName(int flat, absl::string_view unit);

// `owner` keeps what is pointed to; `releases` are those of `offloader`.
// `changed` becomes true with every change. The entry is removed with the
// place; a kept file has it back unless something is committed afterwards.
std::unique_ptr<RestingPlace> PlaceInStore(offload::Offloader* offloader,
                                           DeferredReleases* releases,
                                           int entry, bool* changed,
                                           RestingNotes notes,
                                           std::shared_ptr<const void> owner);

// `memory`: that of `region`, which is erased with the place.
std::unique_ptr<RestingPlace> PlaceOnHost(offload::HostStore* store,
                                          std::string region, char* memory,
                                          std::shared_ptr<const void> owner);

// Optimizers whose states may rest elsewhere (fsdp/options/offload_options.h).

// Those of this library, for texts of errors.
inline constexpr char kFusedOptimizers[] = "FusedAdamW, FusedAdam or FusedSGD";

class RestingStates {
 public:
  virtual ~RestingStates() = default;
  // Moves states that lie in memory, because they were loaded, to where they
  // rest, and adds those that an earlier run has kept (OffloadOptions::keep).
  // step() does the same. After an error some have been moved.
  virtual absl::Status TakeUpStates() = 0;
  // The same of these parameters, and of those that lie in one memory with
  // them; of others nothing is brought in.
  virtual absl::Status TakeUpStatesOf(
      absl::Span<const at::Tensor> parameters) = 0;
};

}  // namespace fsdp

#endif  // FSDP_RESTING_RESTING_PLACES_H_
