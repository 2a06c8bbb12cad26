// How much memory a rank uses beside its shards, as numbers, and the rule by
// which a BufferPool reuses memory.
#ifndef FSDP_MEMORY_MEMORY_STATS_H_
#define FSDP_MEMORY_MEMORY_STATS_H_

#include <cstdint>

namespace fsdp {

// Memory of one pool of buffers.
struct PoolStats {
  int64_t in_use_bytes = 0;       // handed out at present
  int64_t peak_in_use_bytes = 0;  // most handed out at once
  int64_t reserved_bytes = 0;     // allocated, handed out or not
  int64_t allocations = 0;        // in all, without discarded buffers
};

// Memory of one rank, without shards.
struct MemoryStats {
  PoolStats parameters;  // buffers that parameters are gathered into
  PoolStats gradients;   // reduce buffers
};

namespace internal {

// Returns whether a buffer of `size` bytes may be handed out for `bytes`; of
// several the smallest is. If less than half of a buffer would do, a unit much
// larger than others would lend out its memory and have to allocate again.
inline bool Fits(int64_t size, int64_t bytes) {
  constexpr int64_t kLargestWaste = 2;
  return size >= bytes && size <= kLargestWaste * bytes;
}

}  // namespace internal

}  // namespace fsdp

#endif  // FSDP_MEMORY_MEMORY_STATS_H_
