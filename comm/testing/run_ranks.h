// Runs the ranks of a test as threads.
#ifndef COMM_TESTING_RUN_RANKS_H_
#define COMM_TESTING_RUN_RANKS_H_

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// What one rank does. Returns what went wrong instead of asserting: only the
// main thread may assert. A StatusError that it throws counts as returned.
using RankFunction = std::function<absl::Status(Communicator&)>;

// Runs `fn` for every rank of `communicators`, each in its own thread, and
// returns their results by rank. A rank that fails aborts its communicator, so
// that its peers end too. After `limit` all communicators are aborted; a rank
// that does not even end then stops the program, naming the ranks.
std::vector<absl::Status> RunRanks(
    absl::Span<const std::unique_ptr<Communicator>> communicators,
    const RankFunction& fn, absl::Duration limit = absl::Seconds(60));

// The same with a new local group, or one that shares memory where the
// environment has RUN_RANKS_SHARING_MEMORY: for a test's second run.
std::vector<absl::Status> RunRanks(int world_size, const RankFunction& fn,
                                   absl::Duration limit = absl::Seconds(60));

// OK, or the first error of `statuses` with its rank in front. An Aborted or
// Unavailable is named only where nothing else went wrong: it is the echo of
// another failure, or of a rank that has left because of one.
absl::Status AllOk(absl::Span<const absl::Status> statuses);

// AllOk of RunRanks: what most tests assert.
absl::Status RunAllRanks(int world_size, const RankFunction& fn);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RUN_RANKS_H_
