#include "checkpoint/files/crc32c_combine.h"

#include "util/crc32c.h"

namespace fsdp::checkpoint {

uint32_t Crc32cCombine(uint32_t first, uint32_t second, int64_t second_bytes) {
  return ROCKSDB_NAMESPACE::crc32c::Crc32cCombine(first, second, second_bytes);
}

}  // namespace fsdp::checkpoint
