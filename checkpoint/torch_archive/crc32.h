// The CRC32 of zip files (IEEE 802.3), which is not CRC32C.
#ifndef CHECKPOINT_TORCH_ARCHIVE_CRC32_H_
#define CHECKPOINT_TORCH_ARCHIVE_CRC32_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// `before` is the CRC of the bytes in front of these. Thread-safe.
uint32_t Crc32(absl::string_view bytes, uint32_t before = 0);

// Of the bytes with CRC `first`, then `second_bytes` >= 0 ones with `second`.
uint32_t CombineCrc32(uint32_t first, uint32_t second, int64_t second_bytes);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_CRC32_H_
