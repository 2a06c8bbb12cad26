// One rank's view of memory that the ranks of a host can map: its own, and what
// it has mapped of others.
#ifndef COMM_HOST_SHARED_HEAP_H_
#define COMM_HOST_SHARED_HEAP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "comm/host/shared_rank_block.h"
#include "comm/host/shared_segment.h"

namespace fsdp::comm {

// Thread-safe. Held by shared_ptr: its tensors may outlive every communicator.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  // `on_free` runs whenever a tensor's memory is given back, which peers should
  // then forget, too; in the thread that drops the tensor.
  explicit SharedHeap(std::function<void()> on_free);

  // A uint8 tensor over `bytes` of `segment` from `offset` on. Find() knows it
  // as long as it lives.
  at::Tensor MakeTensor(std::shared_ptr<SharedSegment> segment, int64_t offset,
                        int64_t bytes);

  // Where others find these bytes; nowhere when they are not all within one
  // tensor of this heap.
  SharedPlace Find(const void* data, int64_t bytes) const;

  // A place in this process; `data` is valid as long as `segment` is held.
  struct Mapping {
    std::shared_ptr<SharedSegment> segment;
    char* data = nullptr;
  };
  // Maps `bytes` from `place` on, which rank `owner` has told of, unless that
  // is mapped already. Unavailable where there is no such memory.
  absl::StatusOr<Mapping> Resolve(int owner, const SharedPlace& place,
                                  int64_t bytes);

  // Rank `owner` has freed some of its memory: unmaps all that is its.
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

}  // namespace fsdp::comm

#endif  // COMM_HOST_SHARED_HEAP_H_
