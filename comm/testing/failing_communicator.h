// Communicators that fail when the test wants it, and a rank that is always the
// last.
#ifndef COMM_TESTING_FAILING_COMMUNICATOR_H_
#define COMM_TESTING_FAILING_COMMUNICATOR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::comm::testing {

// Says which of a rank's collectives fails, before the peers see it, and how.
// The communicator is then aborted, as after any failure, so that the peers
// fail, too.
struct FailurePlan {
  // One of these is set, or both: the `nth` call of `label`, from 0, fails.
  std::optional<int64_t> nth;
  std::optional<std::string> label;

  absl::Status error = absl::UnavailableError("injected failure");
};

// Returns a communicator that passes all calls on to `base` until one fits
// `plan`.
std::unique_ptr<Communicator> FailOnPlan(std::unique_ptr<Communicator> base,
                                         FailurePlan plan);

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

#endif  // COMM_TESTING_FAILING_COMMUNICATOR_H_
