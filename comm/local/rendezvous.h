// Lets the ranks of one process meet for their collectives. Knows nothing of
// tensors.
#ifndef COMM_LOCAL_RENDEZVOUS_H_
#define COMM_LOCAL_RENDEZVOUS_H_

#include <any>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// The k-th calls of all ranks are one operation. Entering never blocks: the
// last rank to enter an operation runs its action for all. The first failure
// (calls that differ, a missed deadline, Abort(), a rank that has left) ends
// the whole group: every unfinished and later operation fails with it.
// Thread-safe; the caller orders the calls of one rank.
class Rendezvous {
 public:
  // Does the work of one operation. payloads[r] comes from rank r.
  using Action = std::function<void(absl::Span<const std::any> payloads)>;

  // One operation, which the ranks that have entered it share.
  class Operation;

  // Errors give the ranks these names.
  explicit Rendezvous(RankNames names);

  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }

  // Enters the next operation of `rank`. All ranks have to pass an equal
  // `call`, payloads of one type and equivalent actions. The action of the last
  // rank to enter runs in its thread, before Enter() returns. `payload` is
  // destroyed as soon as the operation is done or has failed. If the group has
  // failed, the call fails at once, with the errors of Wait().
  absl::StatusOr<std::shared_ptr<Operation>> Enter(int rank, const Call& call,
                                                   std::any payload,
                                                   const Action& action);

  // Blocks until `operation`, which `rank` has entered, is done. Returns the
  // errors of Work::Wait(); a missed deadline fails the group. An action that
  // already runs is waited for even past the deadline, because it writes into
  // the caller's buffers.
  absl::Status Wait(int rank, const std::shared_ptr<Operation>& operation,
                    absl::Time deadline);

  // Fails the group on behalf of `rank`; later calls do nothing.
  void Abort(int rank, const absl::Status& reason);

  // Says that `rank` makes no more calls. Operations that it has entered stay
  // valid, all others fail.
  void Leave(int rank);

 private:
  struct LastCall {
    Call call;
    int64_t sequence;
  };
  struct Failure {
    int rank;             // the one that failed the group
    absl::Status status;  // of that rank's own operations
    std::string text;     // for the others
    absl::StatusCode code_of_others;
  };

  void FailOnMismatchLocked(int rank, const Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailOnAbsenteesLocked(const Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailLocked(Failure failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string LastSeenLocked(int rank) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ErrorLocked(int rank, const Call& call, int64_t sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RankNames names_;
  absl::Mutex mutex_;
  // These three are by rank.
  std::vector<int64_t> next_sequence_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<LastCall>> last_call_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> left_ ABSL_GUARDED_BY(mutex_);
  // Operations that not all ranks have entered, by sequence number.
  std::map<int64_t, std::shared_ptr<Operation>> open_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_LOCAL_RENDEZVOUS_H_
