// One rank among the ranks of a host: its memory, its doorbell and those of
// its peers. Shared by all groups that the rank is a member of.
#ifndef COMM_HOST_SHARED_HOST_H_
#define COMM_HOST_SHARED_HOST_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/host/doorbell.h"
#include "comm/host/peer_process.h"
#include "comm/host/shared_heap.h"
#include "comm/host/shared_segment.h"

namespace fsdp::comm {

// What a rank shows to all others of the host.
struct SharedMailbox {
  Doorbell doorbell;
  alignas(64) std::atomic<uint64_t> frees;  // of its heap
};

// A group's part in the progress of its rank.
class ProgressSource {
 public:
  virtual ~ProgressSource() = default;
  // Does what can be done without waiting. Called with the host's mutex held.
  virtual void Progress() = 0;
};

// Ranks have no threads of their own for communication: whoever waits, in
// whichever group, moves the data of all groups of its rank, so that no two
// ranks wait for each other in different groups. Thread-safe.
class SharedHost {
 public:
  // `world_rank` of the ranks that call Connect() together.
  static absl::StatusOr<std::shared_ptr<SharedHost>> Create(int world_rank);

  const SegmentAddress& mailbox_address() const { return mailbox_->address(); }
  // `mailboxes` of all ranks, by rank; once, before anything else.
  absl::Status Connect(absl::Span<const SegmentAddress> mailboxes);

  int world_rank() const { return world_rank_; }
  int num_ranks() const { return static_cast<int>(processes_.size()); }
  const std::shared_ptr<SharedHeap>& heap() const { return heap_; }
  const PeerProcess& process(int world_rank) const {
    return *processes_[world_rank];
  }
  absl::Mutex& mutex() ABSL_LOCK_RETURNED(mutex_) { return mutex_; }

  void Add(std::weak_ptr<ProgressSource> source)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ProgressAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Something has changed that `world_rank` may wait for.
  void Ring(int world_rank) { mailboxes_[world_rank]->doorbell.Ring(); }

  // Rings of this rank's doorbell so far; and sleeps until there is one more,
  // or `until`.
  uint32_t NumRings() const { return own().doorbell.Count(); }
  void AwaitRing(uint32_t seen, absl::Time until);

 private:
  SharedHost(int world_rank, std::unique_ptr<SharedSegment> mailbox);

  SharedMailbox& own() const {
    return *reinterpret_cast<SharedMailbox*>(mailbox_->data());
  }
  void ForgetWhatPeersFreed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int world_rank_;
  const std::shared_ptr<SharedSegment> mailbox_;
  const std::shared_ptr<SharedHeap> heap_;
  // By world rank; not changed after Connect().
  std::vector<std::unique_ptr<SharedSegment>> segments_;
  std::vector<SharedMailbox*> mailboxes_;
  std::vector<std::unique_ptr<PeerProcess>> processes_;
  absl::Duration spin_;

  absl::Mutex mutex_;
  std::vector<std::weak_ptr<ProgressSource>> sources_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> frees_seen_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_HOST_SHARED_HOST_H_
