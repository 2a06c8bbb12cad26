// The CRC32C of bytes from those of their parts.
#ifndef CHECKPOINT_FILES_CRC32C_COMBINE_H_
#define CHECKPOINT_FILES_CRC32C_COMBINE_H_

#include <cstdint>

namespace fsdp::checkpoint {

// Of what `first` is the checksum of, followed by the `second_bytes` bytes >= 0
// that `second` is the checksum of. O(log second_bytes).
uint32_t Crc32cCombine(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_CRC32C_COMBINE_H_
