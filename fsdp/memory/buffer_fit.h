// Which free buffer a BufferPool hands out: what memory_plan has to predict.
#ifndef FSDP_MEMORY_BUFFER_FIT_H_
#define FSDP_MEMORY_BUFFER_FIT_H_

#include <cstdint>

namespace fsdp {

// Whether a buffer of `size` bytes may be handed out for `bytes`; of several
// the smallest is. Below half of its size, a unit that is much larger than the
// others would lend its memory out and have to allocate again.
inline bool Fits(int64_t size, int64_t bytes) {
  constexpr int64_t kLargestWaste = 2;
  return size >= bytes && size <= kLargestWaste * bytes;
}

}  // namespace fsdp

#endif  // FSDP_MEMORY_BUFFER_FIT_H_
