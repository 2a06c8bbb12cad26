// Bugs that are planted, to see that simulations find them.
#ifndef TESTING_SIMULATION_MUTANT_H_
#define TESTING_SIMULATION_MUTANT_H_

#include <memory>

#include "comm/communicator.h"
#include "offload/param_store.h"

namespace fsdp::simulation {

enum class Mutant {
  kNone,
  // In what the library calls: as if it had forgotten to.
  kNoGatherWait,     // parameters are used before they have come
  kNoReduceWait,     // gradients are
  kNoBroadcastWait,  // parameters of rank 0 are
  kNoInputWait,      // Wait() of sums does no more than WaitForResult()
  kNoFenceWait,      // common memory is used in no order
  kNoErrors,         // what fails goes on as if it had not
  kNoDeadlines,      // waits for ever
  // Of checkpoints.
  kNoSync,  // of files
  kNoFolderSync,
  kLateWrites,      // what ranks but 0 write comes after the commit
  kShortDiskMoves,  // the first part of a read or write is taken for all of it
  // Of tiers.
  kShortSsdMoves,    // the same, of every eighth one
  kForgetfulMemory,  // of the host: every third write does nothing
};
inline constexpr int kNumMutants = 14;
const char* ToString(Mutant mutant);

// `base`, with the mutant's behaviour.
std::unique_ptr<comm::Communicator> Mutate(
    std::unique_ptr<comm::Communicator> base, Mutant mutant);

std::unique_ptr<offload::ParamStore> MutateMemory(
    std::unique_ptr<offload::ParamStore> base, Mutant mutant);

}  // namespace fsdp::simulation

#endif  // TESTING_SIMULATION_MUTANT_H_
