#include "comm/host/shared_heap.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "comm/host/shared_rank_block.h"
#include "comm/host/shared_segment.h"

namespace fsdp::comm {
namespace {

std::pair<uint64_t, uint64_t> IdentityOf(const SegmentAddress& address) {
  return {address.device, address.inode};
}

}  // namespace

SharedHeap::SharedHeap(std::function<void()> on_free)
    : on_free_(std::move(on_free)) {}

at::Tensor SharedHeap::MakeTensor(std::shared_ptr<SharedSegment> segment,
                                  int64_t offset, int64_t bytes) {
  char* data = segment->data() + offset;
  {
    absl::MutexLock lock(&mutex_);
    tensors_[data] = {bytes, offset, segment};
    own_[IdentityOf(segment->address())] = segment;
  }
  const auto free = [heap = shared_from_this(), segment](void* freed) mutable {
    {
      absl::MutexLock lock(&heap->mutex_);
      heap->tensors_.erase(static_cast<const char*>(freed));
      heap->own_.erase(IdentityOf(segment->address()));
    }
    segment.reset();
    heap->on_free_();
  };
  return at::from_blob(data, {bytes}, free,
                       at::TensorOptions().dtype(at::kByte));
}

SharedPlace SharedHeap::Find(const void* data, int64_t bytes) const {
  const char* begin = static_cast<const char*>(data);
  absl::MutexLock lock(&mutex_);
  auto after = tensors_.upper_bound(begin);
  if (after == tensors_.begin()) return {};
  const auto& [base, range] = *std::prev(after);
  const std::shared_ptr<SharedSegment> segment = range.segment.lock();
  if (segment == nullptr || begin + bytes > base + range.bytes) return {};
  return {segment->address(), range.offset + (begin - base)};
}

absl::StatusOr<SharedHeap::Mapping> SharedHeap::Resolve(
    int owner, const SharedPlace& place, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto identity = IdentityOf(place.segment);
  std::shared_ptr<SharedSegment> segment;
  const auto own = own_.find(identity);
  if (own != own_.end()) segment = own->second.lock();
  if (segment == nullptr) {
    std::shared_ptr<SharedSegment>& mapped = mapped_[owner][identity];
    if (mapped == nullptr) {
      FSDP_ASSIGN_OR_RETURN(mapped, SharedSegment::Open(place.segment));
      mapped->Seal();  // descriptors are scarce
    }
    segment = mapped;
  }
  if (place.offset < 0 || bytes < 0 || bytes > segment->bytes() ||
      place.offset > segment->bytes() - bytes) {
    return absl::UnavailableError(
        absl::StrCat(bytes, " bytes at ", place.offset, " of a segment of ",
                     segment->bytes()));
  }
  char* data = segment->data() + place.offset;
  return Mapping{std::move(segment), data};
}

void SharedHeap::Forget(int owner) {
  absl::MutexLock lock(&mutex_);
  mapped_.erase(owner);
}

}  // namespace fsdp::comm
