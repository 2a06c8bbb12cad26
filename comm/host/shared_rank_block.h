// What one rank of a shared-memory group shows to the others. Plain memory that
// is zero at first; only its owner writes it, every member reads it.
#ifndef COMM_HOST_SHARED_RANK_BLOCK_H_
#define COMM_HOST_SHARED_RANK_BLOCK_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "comm/call.h"
#include "comm/host/shared_segment.h"

namespace fsdp::comm {

static_assert(std::atomic<uint64_t>::is_always_lock_free,
              "processes can share no locks");

// Text of bounded length; what is too long loses its middle.
template <int kSize>
class BoundedText {
 public:
  void Set(absl::string_view text);
  // Of whatever bytes a peer has written here.
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
  SegmentAddress segment;  // of 0 bytes: nowhere, the bytes are staged
  int64_t offset = 0;

  bool exists() const { return segment.descriptor >= 0; }
  friend bool operator==(const SharedPlace& a, const SharedPlace& b) {
    return a.segment == b.segment && a.offset == b.offset;
  }
};

struct PostedCall {
  CallImage call;
  SharedPlace in;   // of the bytes that peers read
  SharedPlace out;  // where `out` is common memory
};

// Every transfer is cut into chunks, by the same rule on all ranks; chunks are
// numbered through all calls of the group.
struct SharedRankBlock {
  static constexpr int kCalls = 64;  // posted and not finished by all, at most
  static constexpr int kSlots = 2;   // chunks staged ahead
  static constexpr int64_t kSlotBytes = 1 << 20;

  // Calls posted.
  alignas(64) std::atomic<uint64_t> arrived;
  // Chunks that peers may read: staged in a slot, or in place.
  std::atomic<uint64_t> staged;
  // Chunks of all-reduces of which this rank's part of the result is there.
  alignas(64) std::atomic<uint64_t> reduced;
  // Chunks of which this rank has read all that it needs from others.
  std::atomic<uint64_t> read;
  // Calls of which nothing that is posted is needed any more.
  std::atomic<uint64_t> finished;

  enum Status : uint32_t { kAlive, kLeft, kFailed };
  alignas(64) std::atomic<uint32_t> status;
  // Once failed: what the others return, and why.
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

}  // namespace fsdp::comm

#endif  // COMM_HOST_SHARED_RANK_BLOCK_H_
