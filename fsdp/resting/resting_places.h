// The places where RestingMemory can be, a store or the host's memory, and the
// interface of optimizers whose states may rest there.
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

// How waits for a place are noted.
struct RestingNotes {
  std::shared_ptr<comm::RankActivity> activity;  // may be null
  std::string what;                              // "unit blocks.3 (parameters)"
};

// Returns the name of a flat parameter in a store: the end of its unit's name,
// and its number.
std::string RegionName(int flat, absl::string_view unit);

// Makes a place in a store. `owner` keeps the objects behind the pointers
// alive; `releases` are those of `offloader`. Every change sets `changed`. The
// entry is removed together with the place, but a kept file gets it back unless
// a commit follows.
std::unique_ptr<RestingPlace> PlaceInStore(offload::Offloader* offloader,
                                           DeferredReleases* releases,
                                           int entry, bool* changed,
                                           RestingNotes notes,
                                           std::shared_ptr<const void> owner);

// Makes a place in `memory`, that of `region`, which is erased together with
// the place.
std::unique_ptr<RestingPlace> PlaceOnHost(offload::HostStore* store,
                                          std::string region, char* memory,
                                          std::shared_ptr<const void> owner);

// Names this library's implementations of RestingStates in texts of errors.
inline constexpr char kFusedOptimizers[] = "FusedAdamW, FusedAdam or FusedSGD";

// An optimizer whose states may rest off the device
// (fsdp/options/offload_options.h).
class RestingStates {
 public:
  virtual ~RestingStates() = default;
  // Moves states that were loaded into memory to where they rest, and adds
  // those that an earlier run has kept (OffloadOptions::keep). step() does the
  // same. After an error some have been moved.
  virtual absl::Status TakeUpStates() = 0;
  // Does the same for these parameters and those that share memory with them;
  // nothing of other parameters is brought into memory.
  virtual absl::Status TakeUpStatesOf(
      absl::Span<const at::Tensor> parameters) = 0;
};

}  // namespace fsdp

#endif  // FSDP_RESTING_RESTING_PLACES_H_
