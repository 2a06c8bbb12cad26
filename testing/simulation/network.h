// How a simulated network treats its ranks.
#ifndef TESTING_SIMULATION_NETWORK_H_
#define TESTING_SIMULATION_NETWORK_H_

#include "absl/time/time.h"

namespace fsdp::simulation {

// When bytes of a collective's inputs are read, and results written.
enum class Moves {
  kAtStart,  // inputs as soon as a rank has called
  kAtEnd,    // at the last moment that the contract allows
  kAnyTime,  // each operation otherwise, and in between
};

struct NetworkOptions {
  absl::Duration timeout = absl::Seconds(30);
  Moves moves = Moves::kAnyTime;
  // The longest that an operation takes once all ranks have called.
  absl::Duration slowest = absl::Milliseconds(1);
  // A message in a thousand is lost and comes after a second time of waiting.
  int lost_per_mille = 0;

  // What not every backend has.
  bool has_all_to_all = true;
  bool has_common_memory = false;
  // Of common memory: each rank sees what others have written at the fence, or
  // the collective, at which it has to, and not before; otherwise at once.
  bool late_visibility = false;
  bool prefers_scaled_inputs = false;
  // Scales in one pass with the sum; otherwise as Communicator does.
  bool scales_itself = true;
  bool symmetric_is_collective = false;
  // What a reduce-scatter was given holds nothing of use afterwards.
  bool overwrites_inputs = false;
  // A root has nothing to wait for.
  bool root_ends_early = false;

  // Ranks learn of a peer's death, not only by their deadlines.
  bool notices_deaths = true;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_NETWORK_H_
