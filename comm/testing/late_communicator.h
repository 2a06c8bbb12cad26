// A rank that is always the last.
#ifndef COMM_TESTING_LATE_COMMUNICATOR_H_
#define COMM_TESTING_LATE_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// Counts the collectives that each rank of a group has started. Thread-safe.
class Progress {
 public:
  explicit Progress(int ranks) : started_(ranks) {}

  void Start(int rank);

  // Blocks until all other ranks have started more collectives than `rank`.
  absl::Status AwaitPeers(int rank, absl::Time deadline);

 private:
  absl::Mutex mutex_;
  std::vector<int64_t> started_ ABSL_GUARDED_BY(mutex_);
};

// Returns a communicator that counts its collectives in `progress`, which
// outlives it. Collectives in `late` are started only after all peers, which
// count in the same `progress`, have started theirs.
std::unique_ptr<Communicator> StartLast(std::unique_ptr<Communicator> base,
                                        Progress* progress,
                                        std::set<Collective> late);

}  // namespace fsdp::comm::testing

#endif  // COMM_TESTING_LATE_COMMUNICATOR_H_
