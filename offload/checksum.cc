#include "offload/checksum.h"

#include "util/crc32c.h"

namespace fsdp::offload {

uint32_t Crc32c(absl::string_view bytes, uint32_t before) {
  return ROCKSDB_NAMESPACE::crc32c::Extend(before, bytes.data(), bytes.size());
}

}  // namespace fsdp::offload
