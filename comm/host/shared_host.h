// The memory and doorbells of the ranks of a host. All groups of a rank share
// them.
#ifndef COMM_HOST_SHARED_HOST_H_
#define COMM_HOST_SHARED_HOST_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "comm/host/shared_segment.h"

namespace fsdp::comm {

static_assert(std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<uint64_t>::is_always_lock_free,
              "processes can share no locks");

// A text of bounded length; a longer one loses its middle.
template <int kSize>
class BoundedText {
 public:
  void Set(absl::string_view text);
  // Safe for any bytes that a peer has written here.
  std::string ToString() const {
    return std::string(text_, std::clamp<int32_t>(size_, 0, kSize));
  }

 private:
  int32_t size_;
  char text_[kSize];
};

// A Call that two ranks compare byte by byte.
struct CallImage {
  int64_t collective;
  int64_t count;
  BoundedText<12> dtype;
  BoundedText<28> detail;
  BoundedText<188> label;
};

CallImage ImageOf(const Call& call);
Call CallOf(const CallImage& image);
bool operator==(const CallImage& a, const CallImage& b);

// Bytes in memory that others can map.
struct SharedPlace {
  SegmentAddress segment;  // without a descriptor: the bytes are staged
  int64_t offset = 0;

  bool exists() const { return segment.exists(); }
  friend bool operator==(const SharedPlace& a, const SharedPlace& b) {
    return a.segment == b.segment && a.offset == b.offset;
  }
};

struct PostedCall {
  CallImage call;
  SharedPlace in;   // the bytes that peers read
  SharedPlace out;  // exists if `out` is common memory
};

// The memory that one rank of a group shows to the others. It is zero at first;
// only its owner writes it. Transfers are cut into chunks, by the same rule on
// all ranks, which are numbered through all calls of the group.
struct SharedRankBlock {
  static constexpr int kCalls = 64;  // most calls that not all have finished
  static constexpr int kSlots = 2;   // chunks staged ahead
  static constexpr int64_t kSlotBytes = 1 << 20;

  // Counts the calls posted.
  alignas(64) std::atomic<uint64_t> arrived;
  // Counts the chunks that peers may read, in a slot or in place.
  std::atomic<uint64_t> staged;
  // Counts the chunks of all-reduces of which this rank's part is reduced.
  alignas(64) std::atomic<uint64_t> reduced;
  // Counts the chunks of which this rank has read all that it needs.
  std::atomic<uint64_t> read;
  // Counts the calls of which no posted data is needed any more.
  std::atomic<uint64_t> finished;

  enum Status : uint32_t { kAlive, kLeft, kFailed };
  alignas(64) std::atomic<uint32_t> status;
  // After a failure, the code and text that the others return.
  int32_t failure_code;
  BoundedText<2000> failure;

  alignas(64) PostedCall calls[kCalls];
  alignas(64) char slots[kSlots][kSlotBytes];
};

template <int kSize>
void BoundedText<kSize>::Set(absl::string_view text) {
  constexpr size_t kCapacity = kSize;
  const size_t size = std::min(text.size(), kCapacity);
  const size_t tail = text.size() > kCapacity ? kCapacity / 2 : 0;
  text.copy(text_, size - tail);
  if (tail > 0) text.copy(text_ + size - tail, tail, text.size() - tail);
  std::memset(text_ + size, 0, kCapacity - size);
  size_ = static_cast<int32_t>(size);
}

// One rank's view of the shared memory of its host: its own, and mappings of
// others'. Thread-safe. Held by shared_ptr, since its tensors may outlive every
// communicator.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  // `on_free` is called whenever a tensor's memory is given back, in the thread
  // that drops the tensor. Peers should then unmap it, too.
  explicit SharedHeap(std::function<void()> on_free);

  // Returns a uint8 tensor over `bytes` of `segment` from `offset` on. Find()
  // finds it as long as it lives.
  at::Tensor MakeTensor(std::shared_ptr<SharedSegment> segment, int64_t offset,
                        int64_t bytes);

  // Returns the place of these bytes for others. It does not exist if they are
  // not all within one tensor of this heap.
  SharedPlace Find(const void* data, int64_t bytes) const;

  // A place in this process. `data` is valid as long as `segment` is held.
  struct Mapping {
    std::shared_ptr<SharedSegment> segment;
    char* data = nullptr;
  };
  // Maps `bytes` from `place` on, unless they are mapped already. `owner` is
  // the rank that has sent the place. Unavailable: there is no such memory.
  absl::StatusOr<Mapping> Resolve(int owner, const SharedPlace& place,
                                  int64_t bytes);

  // Unmaps all memory of rank `owner`, which has freed some of it.
  void Forget(int owner);

 private:
  struct Range {
    int64_t bytes;
    int64_t offset;  // of the tensor in the segment
    std::weak_ptr<SharedSegment> segment;
  };
  using Identity = std::pair<uint64_t, uint64_t>;  // device and inode

  const std::function<void()> on_free_;
  mutable absl::Mutex mutex_;
  std::map<const char*, Range> tensors_ ABSL_GUARDED_BY(mutex_);
  std::map<Identity, std::weak_ptr<SharedSegment>> own_ ABSL_GUARDED_BY(mutex_);
  std::map<int, std::map<Identity, std::shared_ptr<SharedSegment>>> mapped_
      ABSL_GUARDED_BY(mutex_);
};

// Lives in zeroed shared memory. One rank waits for it, any rank rings it. A
// waiter reads Count(), checks its own condition, and then sleeps in Await(); a
// ring in between is not missed (futex(2)).
class alignas(64) Doorbell {
 public:
  uint32_t Count() const { return count_.load(std::memory_order_acquire); }

  // Makes a system call only if somebody sleeps.
  void Ring();

  // Returns once Count() is not `seen` or it is `until`; sometimes earlier.
  // Spins for `spin` before it sleeps.
  void Await(uint32_t seen, absl::Duration spin, absl::Time until);

 private:
  std::atomic<uint32_t> count_;
  std::atomic<uint32_t> sleepers_;
};

// The memory that a rank shows to all other ranks of the host.
struct SharedMailbox {
  Doorbell doorbell;
  alignas(64) std::atomic<uint64_t> frees;  // how often its heap has freed
};

// There is no thread for communication: a thread that waits, in any group,
// moves the data of all groups of its rank, so that no two ranks wait for each
// other in different groups. Thread-safe.
class SharedHost {
 public:
  // `world_rank` is the rank among those that call Connect() together.
  static absl::StatusOr<std::shared_ptr<SharedHost>> Create(int world_rank);

  const SegmentAddress& mailbox_address() const { return mailbox_->address(); }
  // Opens the mailboxes of all ranks, by rank. Call it once, first of all.
  // Unavailable: one cannot be opened or is of another build.
  absl::Status Connect(absl::Span<const SegmentAddress> mailboxes);

  int world_rank() const { return world_rank_; }
  int num_ranks() const { return static_cast<int>(processes_.size()); }
  const std::shared_ptr<SharedHeap>& heap() const { return heap_; }
  const PeerProcess& process(int world_rank) const {
    return *processes_[world_rank];
  }
  absl::Mutex& mutex() ABSL_LOCK_RETURNED(mutex_) { return mutex_; }

  // `source` moves all data of a group that can be moved without waiting, or
  // returns false once the group is gone. It is called with mutex() held.
  void Add(std::function<bool()> source) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ProgressAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Wakes `world_rank`, for which something may have changed.
  void Ring(int world_rank) { mailboxes_[world_rank]->doorbell.Ring(); }

  // Counts the rings of this rank's doorbell.
  uint32_t NumRings() const { return own().doorbell.Count(); }
  // Sleeps until NumRings() is not `seen`, or until `until`.
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
  // These three are by world rank and do not change after Connect().
  std::vector<std::unique_ptr<SharedSegment>> segments_;
  std::vector<SharedMailbox*> mailboxes_;
  std::vector<std::unique_ptr<PeerProcess>> processes_;
  absl::Duration spin_;

  absl::Mutex mutex_;
  std::vector<std::function<bool()>> sources_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> frees_seen_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_HOST_SHARED_HOST_H_
