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

// Runs one rank. It may EXPECT, and returns errors where it cannot go on, since
// only the main thread may ASSERT. A StatusError that it throws counts as
// returned.
using RankFunction = std::function<absl::Status(Communicator&)>;

// Runs `fn` for every rank of `communicators`, each in its own thread with one
// compute thread, and returns their results by rank. A rank that fails aborts
// its communicator, so that its peers end too. After `limit` all communicators
// are aborted; a rank that does not even end then stops the program, naming the
// ranks.
std::vector<absl::Status> RunRanks(
    absl::Span<const std::unique_ptr<Communicator>> communicators,
    const RankFunction& fn, absl::Duration limit = absl::Seconds(60));

// Does the same with a new local group, or with one that shares memory if the
// environment has RUN_RANKS_SHARING_MEMORY, for a second run of a test.
std::vector<absl::Status> RunRanks(int world_size, const RankFunction& fn,
                                   absl::Duration limit = absl::Seconds(60));

// Returns OK, or the first error of `statuses` with its rank in front. Aborted
// and Unavailable count only if there is no other error, since they are echoes
// of another failure, or of a rank that has left because of one.
absl::Status AllOk(absl::Span<const absl::Status> statuses);

// Returns AllOk() of RunRanks(), which most tests assert.
absl::Status RunAllRanks(int world_size, const RankFunction& fn);

// Returns the error of the start, or that of Work::Wait() after 30 s at most,
// which no working group needs.
absl::Status Finish(StartedWork work);

// Runs ranks that all return the same refusal, some of them while others are
// still in the last collective, with RunRanks(). The refusal aborts nobody.
std::vector<absl::Status> RunRefusedRanks(int world_size,
                                          const RankFunction& fn);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_RUN_RANKS_H_
