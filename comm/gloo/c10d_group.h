// The operations of one rank of a c10d group: their order, failures and
// diagnosis.
#ifndef COMM_GLOO_C10D_GROUP_H_
#define COMM_GLOO_C10D_GROUP_H_

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "comm/call.h"
#include "comm/gloo/call_exchange.h"
#include "comm/gloo/message_transport.h"
#include "comm/gloo/peer_collectives.h"
#include "comm/gloo/peer_messages.h"
#include "comm/group/failure_report.h"
#include "comm/group/group_monitor.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Runs operations one after the other on a thread of its own, so that those
// that take several steps overlap with the caller's work as well. Thread-safe.
class C10dGroup {
 public:
  // What an operation does once it is its turn. Keeps its tensors alive.
  using Run =
      std::function<absl::Status(PeerCollectives&, PeerCollectives::Agree)>;
  class Operation;

  // `transport` connects the ranks that meet in `store`.
  static absl::StatusOr<std::shared_ptr<C10dGroup>> Create(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
      std::unique_ptr<MessageTransport> transport,
      absl::Duration diagnosis_timeout);

  // Stops; see Stop().
  ~C10dGroup();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Queues an operation. Fails at once when the group has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Post(Call call, Run run);

  // As Work::Wait, for an operation of this group.
  absl::Status Wait(Operation& operation, absl::Time deadline);

  // Fails the group, here and on the peers.
  void Abort(const absl::Status& reason);

  // Fails what is not done, tells the peers that this rank has left and ends
  // the threads. Once.
  void Stop();

 private:
  C10dGroup(int rank, int world_size,
            std::unique_ptr<MessageTransport> transport,
            absl::Duration diagnosis_timeout);

  void RunOperations();
  absl::Status Execute(Operation& operation);
  void Fail(Cause cause, std::string text);
  absl::Status ErrorOf(const Operation& operation);
  absl::Status FindVerdict();
  std::string PositionLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int rank_;
  const int world_size_;
  const absl::Duration diagnosis_timeout_;
  // What is below uses what is above. Stop() ends calls_ and messages_.
  std::unique_ptr<GroupMonitor> monitor_;
  std::unique_ptr<PeerMessages> messages_;
  std::unique_ptr<CallExchange> calls_;  // used by worker_ only
  PeerCollectives collectives_;          // used by worker_ only

  absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<std::shared_ptr<Operation>> queue_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Operation> current_ ABSL_GUARDED_BY(mutex_);
  std::string last_finished_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::optional<RankReport> failure_ ABSL_GUARDED_BY(mutex_);  // the first
  absl::Time failed_at_ ABSL_GUARDED_BY(mutex_);
  absl::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mutex_);
  std::thread worker_;
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_C10D_GROUP_H_
