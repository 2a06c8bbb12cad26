// What the parts of OffloadSpace share.
#ifndef FSDP_RESTING_STEPPED_KINDS_H_
#define FSDP_RESTING_STEPPED_KINDS_H_

#include <array>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "comm/agreement.h"
#include "comm/communicator.h"
#include "fsdp/options/offload_options.h"

namespace fsdp {

// What a step of the optimizer changes, and a rollback takes back. Gradients
// are only read by it.
inline constexpr std::array<RestingKind, 2> kSteppedKinds = {
    RestingKind::kParameters, RestingKind::kOptimizer};

// comm::Agree(). Ranks wait here for one whose disk is slower, as long as for
// any collective.
inline absl::Status AgreeInTime(comm::Communicator& world,
                                const absl::Status& mine,
                                absl::string_view what) {
  return comm::Agree(world, mine, what, absl::Now() + world.default_timeout());
}

}  // namespace fsdp

#endif  // FSDP_RESTING_STEPPED_KINDS_H_
