// Orders the operations of one rank of a group of messages, and diagnoses their
// failures.
#ifndef COMM_GLOO_MESSAGE_GROUP_H_
#define COMM_GLOO_MESSAGE_GROUP_H_

#include <c10/util/intrusive_ptr.h>

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
#include "comm/gloo/message_transport.h"
#include "comm/gloo/peer_collectives.h"
#include "comm/group/failure_report.h"
#include "comm/group/operation_queue.h"

namespace c10d {
class Store;
}

namespace fsdp::comm {

// Makes sure that all ranks are in the same call before data flows: before each
// operation the ranks send each other their calls. This adds no latency: the
// receives were posted one operation earlier, and a sender has to wait for its
// peers anyway. Without it, calls that differ would hang or, with some
// backends, write past a buffer. Used by one thread at a time.
class CallExchange {
 public:
  CallExchange(int rank, RankNames names, PeerMessages* messages);
  ~CallExchange();
  CallExchange(const CallExchange&) = delete;
  CallExchange& operator=(const CallExchange&) = delete;

  // Posts the first receives. Call it once.
  absl::Status Start();

  // Tells the peers of this rank's call number `sequence`.
  absl::Status Announce(int64_t sequence, const Call& call);

  // Blocks until all peers have announced their call. Returns InvalidArgument,
  // with all calls, if they differ, or the errors of PeerMessages::Await().
  absl::Status Agree();

 private:
  struct Announcement;

  absl::Status PostReceives();

  const int rank_;
  const RankNames names_;
  PeerMessages* const messages_;
  std::vector<Announcement> announcements_;  // by rank
  PeerMessages::Batch receives_;
  PeerMessages::Batch sends_;
};

// Runs operations one after the other on a thread of its own, so that all their
// steps overlap with the caller's work. Thread-safe.
class MessageGroup {
 public:
  // Runs an operation when it is its turn. Keeps its tensors alive.
  using Run =
      std::function<absl::Status(PeerCollectives&, PeerCollectives::Agree)>;
  using Operation = OperationQueue::Operation;

  // `transport` connects the ranks, which meet in `store`.
  static absl::StatusOr<std::shared_ptr<MessageGroup>> Create(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, RankNames names,
      std::unique_ptr<MessageTransport> transport,
      absl::Duration diagnosis_timeout);

  // Calls Stop().
  ~MessageGroup();

  int rank() const { return rank_; }
  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }

  // Queues an operation. Fails at once when the group has failed.
  absl::StatusOr<std::shared_ptr<Operation>> Post(Call call, Run run);

  // Does what Work::Wait() does.
  absl::Status Wait(const Operation& operation, absl::Time deadline);

  // Fails the group, here and on the peers.
  void Abort(const absl::Status& reason);

  // Fails operations that are not done, tells the peers that this rank has left
  // and ends the threads. Only the first call counts.
  void Stop();

 private:
  MessageGroup(int rank, RankNames names,
               std::unique_ptr<MessageTransport> transport,
               absl::Duration diagnosis_timeout);

  absl::Status Execute(const Call& call, int64_t sequence, const Run& run);
  void Fail(Cause cause, std::string text);
  // Returns the error of the operation `name`.
  absl::Status ErrorOf(absl::string_view name);
  absl::Status FindVerdict();

  const int rank_;
  const RankNames names_;
  const absl::Duration diagnosis_timeout_;
  // Each of these uses those above it. Stop() ends calls_ and messages_.
  std::unique_ptr<ReportExchange> reports_;
  std::unique_ptr<PeerMessages> messages_;
  std::unique_ptr<CallExchange> calls_;  // used by operations only
  PeerCollectives collectives_;          // used by operations only

  absl::Mutex mutex_;
  int64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<RankReport> failure_ ABSL_GUARDED_BY(mutex_);  // the first
  absl::Time failed_at_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mutex_);
  // The last, so that its thread ends first.
  OperationQueue queue_;
};

}  // namespace fsdp::comm

#endif  // COMM_GLOO_MESSAGE_GROUP_H_
