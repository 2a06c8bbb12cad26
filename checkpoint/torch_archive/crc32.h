// The CRC32 of zip files (IEEE 802.3), which is not CRC32C.
#ifndef CHECKPOINT_TORCH_ARCHIVE_CRC32_H_
#define CHECKPOINT_TORCH_ARCHIVE_CRC32_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {

// `before` is the CRC of the bytes in front of these. Thread-safe.
uint32_t Crc32(absl::string_view bytes, uint32_t before = 0);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_CRC32_H_
