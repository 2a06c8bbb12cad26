// Planted bugs, to see that simulations find them.
#ifndef TESTING_SIMULATION_MUTANT_H_
#define TESTING_SIMULATION_MUTANT_H_

#include <memory>

#include "comm/communicator.h"
#include "offload/param_store.h"

namespace fsdp::simulation {

enum class Mutant {
  kNone,
  // These act as if the library had forgotten a call.
  kNoGatherWait,     // parameters are used before they have come
  kNoReduceWait,     // gradients are used before they have come
  kNoBroadcastWait,  // parameters are used before rank 0's have come
  kNoInputWait,      // Wait() of sums does no more than WaitForResult()
  kNoFenceWait,      // common memory is used in no order
  kNoErrors,         // a failure goes on as if it had not happened
  kNoDeadlines,      // waits last for ever
  // These are bugs of checkpoints.
  kNoSync,  // of files
  kNoFolderSync,
  kLateWrites,      // ranks but 0 write after the commit
  kShortDiskMoves,  // the first part of a read or write is taken for all of it
  // These are bugs of tiers.
  kShortSsdMoves,    // the same, for every eighth request
  kForgetfulMemory,  // of the host: every third write does nothing
};
inline constexpr int kNumMutants = 14;
const char* ToString(Mutant mutant);

// Returns `base` with the mutant's behaviour.
std::unique_ptr<comm::Communicator> Mutate(
    std::unique_ptr<comm::Communicator> base, Mutant mutant);

std::unique_ptr<offload::ParamStore> MutateMemory(
    std::unique_ptr<offload::ParamStore> base, Mutant mutant);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_MUTANT_H_
