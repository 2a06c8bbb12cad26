// How a simulated network treats its ranks.
#ifndef TESTING_SIMULATION_NETWORK_H_
#define TESTING_SIMULATION_NETWORK_H_

#include "absl/time/time.h"

namespace fsdp::simulation {

// When a collective's inputs are read and its results written.
enum class Moves {
  kAtStart,  // inputs as soon as a rank has called
  kAtEnd,    // at the last moment that the contract allows
  kAnyTime,  // differs between operations, and lies in between
};

struct NetworkOptions {
  absl::Duration timeout = absl::Seconds(30);
  Moves moves = Moves::kAnyTime;
  // The longest time of an operation once all ranks have called.
  absl::Duration slowest = absl::Milliseconds(1);
  // A message in a thousand is lost and comes after a second time of waiting.
  int lost_per_mille = 0;

  // Not every backend has these.
  bool has_all_to_all = true;
  bool has_common_memory = false;
  // Each rank sees what others have written to common memory not before the
  // fence or the collective at which it has to; otherwise it sees it at once.
  bool late_visibility = false;
  bool prefers_scaled_inputs = false;
  // Scales in one pass with the sum; otherwise scales as Communicator does.
  bool scales_itself = true;
  bool symmetric_is_collective = false;
  // The input of a reduce-scatter holds nothing of use afterwards.
  bool overwrites_inputs = false;
  // A root has nothing to wait for.
  bool root_ends_early = false;

  // Ranks learn of a peer's death, and not only by their deadlines.
  bool notices_deaths = true;
};

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_NETWORK_H_
