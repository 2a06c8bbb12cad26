// Orders the operations of one rank of a hierarchical group, and ends the group
// after a failure.
#ifndef COMM_HIERARCHICAL_HIERARCHICAL_GROUP_H_
#define COMM_HIERARCHICAL_HIERARCHICAL_GROUP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/group/operation_queue.h"
#include "comm/group/operation_watchdog.h"
#include "comm/hierarchical/host_layout.h"

namespace fsdp::comm {

// The groups that make a hierarchical one; see hierarchical_communicator.h.
struct HierarchicalParts {
  std::unique_ptr<Communicator> host;
  std::unique_ptr<Communicator> rail;
  std::unique_ptr<Communicator> network;
};

// Runs operations one after the other on a thread of its own, so that all ranks
// make their calls to the parts in one order, and a call never blocks. The
// first failure of a part ends all parts, here and on the peers, which the
// network tells. Thread-safe.
class HierarchicalGroup {
 public:
  using Run = std::function<absl::Status(HierarchicalGroup&)>;
  using Operation = OperationQueue::Operation;

  // ResourceExhausted: no thread can be started. The peers are told.
  static absl::StatusOr<std::shared_ptr<HierarchicalGroup>> Create(
      HierarchicalParts parts);

  // Calls Stop().
  ~HierarchicalGroup();

  int rank() const { return rank_; }
  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }
  const HostLayout& layout() const { return layout_; }

  // Queues an operation. Fails at once when the group has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Post(const Call& call, Run run);

  // Does the same for an operation that is not counted as a call.
  absl::StatusOr<std::shared_ptr<Operation>> PostUncounted(
      const std::string& name, Run run);

  // Does what Work::Wait() does.
  absl::Status Wait(const Operation& operation, absl::Time deadline);

  // Fails the group, here and on the peers.
  void Abort(const absl::Status& reason);

  // Fails operations that are not done, ends the thread and destroys the parts.
  // Only the first call counts.
  void Stop();

  // The rest of the public methods is for operations while they run.
  Communicator& host() { return *parts_.host; }
  Communicator& rail() { return *parts_.rail; }
  CreatedCommunicator SplitNetwork(int color, int key);

  // A call that an operation has made to `part`.
  struct Started {
    const Communicator* part;
    StartedWork work;
  };
  // Waits for all calls, in order, and returns the first error. An error fails
  // the group at once, so that none of the calls goes on.
  absl::Status Finish(std::vector<Started> works);
  absl::Status FinishOne(const Communicator& part, StartedWork started);

 private:
  explicit HierarchicalGroup(HierarchicalParts parts);

  // The error of this rank's operations, and the one for the other ranks.
  struct Failure {
    absl::Status status;
    absl::Status status_of_others;
  };
  // The call that the running operation waits for.
  struct Stage {
    const Communicator* part = nullptr;
    std::shared_ptr<Work> work;
  };

  absl::Status Execute(absl::string_view name, const Run& run);
  void GiveUp(const Operation& operation);
  void Fail(Failure failure);
  void FailWith(const Communicator& part, const absl::Status& status);
  // Returns the error of the operation `name` of a group that has failed.
  absl::Status ErrorOf(absl::string_view name) ABSL_LOCKS_EXCLUDED(mutex_);

  HierarchicalParts parts_;  // not changed before Stop() ends
  const HostLayout layout_;
  const int rank_;
  const RankNames names_;
  std::unique_ptr<AbortListener>
      listener_;  // of the network; used by operations

  absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  Stage stage_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);  // the first
  // The last, so that its thread ends first.
  OperationQueue queue_;
};

}  // namespace fsdp::comm

#endif  // COMM_HIERARCHICAL_HIERARCHICAL_GROUP_H_
