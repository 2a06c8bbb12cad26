// The rule by which a BufferPool chooses a free buffer and memory_plan predicts
// it.
#ifndef FSDP_MEMORY_BUFFER_FIT_H_
#define FSDP_MEMORY_BUFFER_FIT_H_

#include <cstdint>

namespace fsdp {

// Returns whether a buffer of `size` bytes may be handed out for `bytes`; of
// several the smallest is. If less than half of a buffer would do, a unit much
// larger than others would lend out its memory and have to allocate again.
inline bool Fits(int64_t size, int64_t bytes) {
  constexpr int64_t kLargestWaste = 2;
  return size >= bytes && size <= kLargestWaste * bytes;
}

}  // namespace fsdp

#endif  // FSDP_MEMORY_BUFFER_FIT_H_
