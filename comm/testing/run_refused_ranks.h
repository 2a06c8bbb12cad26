// Runs ranks that are refused something.
#ifndef COMM_TESTING_RUN_REFUSED_RANKS_H_
#define COMM_TESTING_RUN_REFUSED_RANKS_H_

#include <vector>

#include "absl/status/status.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {

// RunRanks() of ranks that all return the same refusal, some of them while
// others are not out of the last collective yet: what they return aborts
// nobody.
std::vector<absl::Status> RunRefusedRanks(int world_size,
                                          const RankFunction& fn);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RUN_REFUSED_RANKS_H_
