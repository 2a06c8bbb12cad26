// CRC32C of blocks of bytes.
#ifndef OFFLOAD_CHECKSUM_H_
#define OFFLOAD_CHECKSUM_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace fsdp::offload {

// Returns the CRC32C of `bytes`, computed by the processor's own instruction if
// it has one. `before` is the checksum of the bytes in front of `bytes`.
// Thread-safe.
uint32_t Crc32c(absl::string_view bytes, uint32_t before = 0);

}  // namespace fsdp::offload

#endif  // OFFLOAD_CHECKSUM_H_
