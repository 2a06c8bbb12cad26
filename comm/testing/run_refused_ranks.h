// Runs ranks that all return the same refusal.
#ifndef COMM_TESTING_RUN_REFUSED_RANKS_H_
#define COMM_TESTING_RUN_REFUSED_RANKS_H_

#include <vector>

#include "absl/status/status.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {

// Runs ranks that all return the same refusal, some of them while others are
// still in the last collective, with RunRanks(). The refusal aborts nobody.
std::vector<absl::Status> RunRefusedRanks(int world_size,
                                          const RankFunction& fn);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RUN_REFUSED_RANKS_H_
